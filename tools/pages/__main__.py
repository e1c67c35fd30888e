"""Write the sources of the site: `python -m tools.pages FOLDER`; `make docs` builds it with MkDocs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.pages.staging import BrokenLinkError, stage


def main() -> int:
    """Write the pages.

    Returns:
        Exit code: 0 done, 1 a link leads nowhere.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the sources; its contents are removed first")
    try:
        count = stage(parser.parse_args().folder)
    except BrokenLinkError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{count} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
