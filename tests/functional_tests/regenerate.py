"""Write golden values anew: `make golden`, or `make golden ARGS=hybrid/chat` for one case. Review the diff."""

from __future__ import annotations

import argparse

from megatron_ext.serving.results import to_json
from tests.functional_tests.cases import find_cases
from tests.functional_tests.checker import golden_values


def main() -> None:
    """Run every case, or those named, and write its golden values."""
    cases = {case.name: case for case in find_cases()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL/CASE", help=f"of {', '.join(cases)}; default: all")
    names = parser.parse_args().names or list(cases)
    unknown = [name for name in names if name not in cases]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(cases)}")
    for name in names:
        case = cases[name]
        case.golden_path.write_text(to_json(golden_values(case.run())), encoding="utf-8")
        print(f"wrote {case.golden_path}")


if __name__ == "__main__":
    main()
