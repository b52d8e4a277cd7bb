"""Read pip's report of an installation; print its packages as requirements with hashes.

    pip install --dry-run --ignore-installed --report - PACKAGES | python hashes.py > hashes.txt

`make hashes` does so.  What has no hash is an error, except the folder that is installed itself.
"""

import json
import sys
from typing import Any


def requirements(report: dict[str, Any]) -> list[str]:
    """Return one line for each package, by name."""
    lines = []
    for package in report["install"]:
        named = f"{package['metadata']['name']}=={package['metadata']['version']}"
        origin = package["download_info"]
        if "dir_info" in origin:
            continue
        sha256 = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not sha256:
            sys.exit(f"{named}: the index gives no sha256 of {origin['url']}")
        lines.append(f"{named} --hash=sha256:{sha256}")
    return sorted(lines, key=str.lower)


if __name__ == "__main__":
    print("\n".join(requirements(json.load(sys.stdin))))
