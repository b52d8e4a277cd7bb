"""Read pip's report of an installation; print a bill of materials in CycloneDX 1.6.

    pip install --dry-run --ignore-installed --report - PACKAGES | python sbom.py > sbom.json

`make sbom` does so.  Components are in the order of their names, and nothing in it tells when or
where it was made, so that the same installation has the same bill.
"""

import json
import sys
from typing import Any


def bill(report: dict[str, Any]) -> dict[str, Any]:
    """Return the bill: what is installed from a folder is its subject, all else its components."""
    subject: dict[str, Any] | None = None
    components = []
    for package in report["install"]:
        data, origin = package["metadata"], package["download_info"]
        name, version = data["name"], data["version"]
        component: dict[str, Any] = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name.lower()}@{version}",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name.lower()}@{version}",
        }
        if expression := data.get("license_expression"):
            component["licenses"] = [{"expression": expression}]
        if "dir_info" in origin:
            subject = component | {"type": "application"}
            continue
        sha256 = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not sha256:
            sys.exit(f"{name}=={version}: the index gives no sha256 of {origin['url']}")
        components.append(component | {"hashes": [{"alg": "SHA-256", "content": sha256}]})
    if subject is None:
        sys.exit("no package is installed from a folder: name the project's, as '.[torch]'")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": sorted(components, key=lambda one: str(one["name"]).lower()),
    }


if __name__ == "__main__":
    print(json.dumps(bill(json.load(sys.stdin)), indent=1))
