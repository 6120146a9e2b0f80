"""Makes `goldens/*.npz`: what transformers' torch models compute on the cases, at a few positions.

    python -m tests.models.make_goldens

Run it from the repository's root, with the `parity` extra installed.
"""

import tempfile
from pathlib import Path

import numpy as np

from tests.models.cases import CASES, POSITIONS, tokens, write_folder

GOLDENS = Path(__file__).parent / "goldens"
KEPT = ("cos", "sin", "hidden", "logits")


def at_positions(stages: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a golden keeps: some pieces, at some positions."""
    return {name: stages[name][list(POSITIONS)] for name in KEPT}


def golden(name: str, folder: Path) -> dict[str, np.ndarray]:
    from tests.models.torch_twin import stages

    return at_positions(stages(write_folder(folder / name, CASES[name]), tokens()))


def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            found = golden(name, Path(folder))
            np.savez_compressed(GOLDENS / f"{name}.npz", allow_pickle=False, **found)
            print(f"{name}: |logits| up to {abs(found['logits']).max():.1f}")


if __name__ == "__main__":
    main()
