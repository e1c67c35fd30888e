"""Write golden values anew: `make golden`, or `make golden ARGS=hybrid/chat` for one case. Review the diff."""

from __future__ import annotations

import argparse

from megatron_ext.offline.output_file import to_json
from tests.functional_tests.cases import CASES, case_folders, read_case
from tests.functional_tests.checker import golden_values, without_rounding


def main() -> None:
    """Run every case, or those named, and write its golden values."""
    folders = {folder.relative_to(CASES).as_posix(): folder for folder in case_folders()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL/CASE", help=f"of {', '.join(folders)}; default: all")
    names = parser.parse_args().names or list(folders)
    unknown = [name for name in names if name not in folders]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(folders)}")
    for name in names:
        case = read_case(folders[name])
        values = golden_values(case.run())
        if case.golden_path.is_file() and case.golden_run_path.is_file():
            values = without_rounding(values, case.golden_values())
        for path, content in ((case.golden_path, values.requests), (case.golden_run_path, values.run)):
            path.write_text(to_json(content), encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
