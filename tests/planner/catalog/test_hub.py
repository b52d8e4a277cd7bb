"""Models by their names on the Hugging Face hub: from its cache, and from a server of our own."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from meshwright.planner.catalog import hub
from meshwright.planner.catalog.expressions import resolve_model
from meshwright.planner.errors import DocumentError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 320,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def keep(cache: Path, name: str, revision: str, config: dict[str, object]) -> None:
    """Put a config.json where the hub's client would."""
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_a_cached_configuration_is_read_and_named_as_on_the_hub(cache: Path) -> None:
    keep(cache, "somebody/Small-1M", "a", CONFIG)

    model = resolve_model("somebody/Small-1M")

    assert (model.name, model.source) == ("Small-1M", "somebody/Small-1M")
    assert model.architecture is not None
    assert model.architecture.hidden_size == 64


def test_the_revision_of_main_counts(cache: Path) -> None:
    keep(cache, "somebody/small", "new", CONFIG | {"num_hidden_layers": 5})
    keep(cache, "somebody/small", "main-one", CONFIG)
    refs = cache / "models--somebody--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text("main-one")

    assert len(resolve_model("somebody/small").chain) == 2 + 2


def test_the_exact_name_in_the_cache_goes_before_a_variant_of_the_catalogue(cache: Path) -> None:
    assert resolve_model("Qwen/Qwen2.5-7B-Instruct").name == "qwen2.5-7b"
    keep(cache, "Qwen/Qwen2.5-7B-Instruct", "a", CONFIG)
    assert resolve_model("Qwen/Qwen2.5-7B-Instruct").name == "Qwen2.5-7B-Instruct"


@pytest.mark.parametrize(
    ("name", "is_called"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("ibm-granite/granite-3.1-8b-instruct", "granite-3.1-8b"),
        ("qwen2.5-32b-instruct", "qwen2.5-32b"),
    ],
)
def test_variants_of_one_shape_are_the_catalogues(cache: Path, name: str, is_called: str) -> None:
    assert resolve_model(name).name == is_called


@pytest.mark.parametrize("name", ["mistralai/Mistral-Small-24B-Instruct-2501", "nobody/nothing"])
def test_nothing_is_fetched_offline(cache: Path, name: str) -> None:
    with pytest.raises(DocumentError, match="nothing is fetched offline; give its config"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/../b", "a/b/c", "somebody/"])
def test_only_names_of_the_hub_are_looked_for(name: str) -> None:
    assert not hub.is_hub_name(name)


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has one model."""

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer(json.dumps(CONFIG).encode())

    def do_HEAD(self) -> None:
        """Answer a HEAD."""
        self._answer(json.dumps(CONFIG).encode())

    def _answer(self, body: bytes) -> None:
        there = self.path == "/somebody/small/resolve/main/config.json" or COMMIT in self.path
        self.send_response(200 if there else 404)
        self.send_header("Content-Length", str(len(body) if there else 0))
        self.send_header("ETag", '"e1"')
        self.send_header("X-Repo-Commit", COMMIT)
        if not there:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if there and self.command == "GET":
            self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Stay silent."""


def test_a_configuration_is_fetched_once_and_said(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = (
        "import sys\n"
        "from meshwright.cli import main\n"
        "words = ['--cluster', '1xrtx-3090', '--layout', 'tp=1', '--seq-len', '64',\n"
        "         '--global-batch', '1']\n"
        "print(main(['predict', 'somebody/small', *words]))\n"
        "print(main(['predict', 'somebody/small', *words, '--offline']))\n"
        "print(main(['predict', 'somebody/other', *words]))\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    server.shutdown()
    server.server_close()

    assert ended.stdout.splitlines()[-1] == "1", ended.stderr
    assert ended.stdout.count("small on rtx-3090") + ended.stdout.count("small on 1xrtx-3090") == 2
    size = len(json.dumps(CONFIG))
    assert ended.stderr.count(f"of somebody/small from {environment['HF_ENDPOINT']}") == 1
    assert f"({size} bytes)" in ended.stderr
    assert "'somebody/other' is no model of the catalogue" in ended.stderr
