"""Read pip's report of an installation; print its packages with the hashes of their archives.

    pip install --dry-run --ignore-installed --report - PACKAGES | python hashes.py > hashes.txt
    pip install --dry-run --ignore-installed --report - PACKAGES | python hashes.py --bill

`make hashes` and `make sbom` do so: as requirements, or as a bill of materials in CycloneDX 1.6.
Packages are in the order of their names, and nothing tells when or where it was made.  What has no
hash is an error, except the folder that is installed itself.
"""

import json
import sys
from typing import Any


def archives(report: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return the metadata of each package that is fetched, with its SHA-256, by name."""
    found = []
    for package in report["install"]:
        data, origin = package["metadata"], package["download_info"]
        if "dir_info" in origin:
            continue
        sha256 = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not sha256:
            named = f"{data['name']}=={data['version']}"
            sys.exit(f"{named}: the index gives no sha256 of {origin['url']}")
        found.append((data, sha256))
    return sorted(found, key=lambda one: str(one[0]["name"]).lower())


def requirements(report: dict[str, Any]) -> str:
    """Return one line for each package."""
    return "\n".join(
        f"{data['name']}=={data['version']} --hash=sha256:{sha256}"
        for data, sha256 in archives(report)
    )


def bill(report: dict[str, Any]) -> str:
    """Return the bill: what is installed from a folder is its subject, all else its components."""
    folders = [one["metadata"] for one in report["install"] if "dir_info" in one["download_info"]]
    if not folders:
        sys.exit("no package is installed from a folder: name the project's, as '.[torch]'")
    whole = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(folders[-1], "application")},
        "components": [
            component(data, "library") | {"hashes": [{"alg": "SHA-256", "content": sha256}]}
            for data, sha256 in archives(report)
        ],
    }
    return json.dumps(whole, indent=1)


def component(data: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a package as a bill names it."""
    url = f"pkg:pypi/{data['name'].lower()}@{data['version']}"
    found = {
        "type": kind,
        "bom-ref": url,
        "name": data["name"],
        "version": data["version"],
        "purl": url,
    }
    if expression := data.get("license_expression"):
        found["licenses"] = [{"expression": expression}]
    return found


if __name__ == "__main__":
    told = json.load(sys.stdin)
    print(bill(told) if "--bill" in sys.argv[1:] else requirements(told))
