"""Screenshots made small: WebP of at most 60 kB (needs Pillow).

python benchmarks/page_check/pictures.py FOLDER docs/pictures
"""

import sys
from pathlib import Path

from PIL import Image

MOST_BYTES = 60_000


def main(source: Path, target: Path) -> None:
    """Write every picture of a folder with the best quality that is small enough."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob("*.png")):
        picture = target / f"{file.stem}.webp"
        for quality in (90, 80, 70, 60, 50, 40, 30, 20):
            Image.open(file).convert("RGB").save(picture, quality=quality, method=6)
            if picture.stat().st_size <= MOST_BYTES:
                break
        print(picture, quality, picture.stat().st_size)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
