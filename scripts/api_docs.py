"""Write the reference of the Python API, made of its docstrings. Works without installing; needs pdoc.

python scripts/api_docs.py FOLDER
"""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pdoc

import pipetrain


def main(folder: Path) -> None:
    """Write `folder`/pipetrain.html; what pdoc warns of, such as an unknown name, is an error."""
    for name in pipetrain.__all__:  # pdoc looks for them where a first use puts them
        setattr(pipetrain, name, getattr(pipetrain, name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc("pipetrain", output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
