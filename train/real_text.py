"""Natural text and source code for training and evaluating gates, from Debian packages: novels, manuals, a glossary,
Python libraries.

    pip install '.[text]' && mkdir packages && (cd packages && apt-get download r-cran-janeaustenr jargon-text git-doc \
        debian-reference-en debian-policy debian-faq python3.11-doc developers-reference python3-jinja2 \
        python3-werkzeug python3-requests python3-networkx python3-boltons python3-click python3-more-itertools \
        python3-toolz)
    python -m train.real_text --packages packages --out text --code

Nothing is installed: the packages are unpacked with dpkg-deb and read. No part of a held-out work is trained on.
"""

import dataclasses
import gzip
import itertools
import json
import subprocess
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvjax.cli.launch import parse_command, run_command
from kvjax.errors import UserError
from kvjax.files import write_text
from train.code_records import code_records

DOC = "usr/share/doc"
PYTHON = f"{DOC}/python3.11/html/_sources"
NOVELS = "usr/lib/R/site-library/janeaustenr/data/Rdata"
LIBRARIES = "usr/lib/python3/dist-packages"
CODE, RECORDS = "code", "scbench_repoqa.jsonl"
"""The folder of held-out source code, and its file of functions to find."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One work: the files of a Debian package that match a pattern, in the order of their names, or a novel from R's
    package of Jane Austen's novels."""

    package: str
    pattern: str = ""
    novel: str = ""
    heldout: bool = False
    code: bool = False


WORKS = {
    "emma": Work("r-cran-janeaustenr", novel="emma"),
    "mansfield_park": Work("r-cran-janeaustenr", novel="mansfieldpark"),
    "northanger_abbey": Work("r-cran-janeaustenr", novel="northangerabbey"),
    "pride_and_prejudice": Work("r-cran-janeaustenr", novel="prideprejudice"),
    "sense_and_sensibility": Work("r-cran-janeaustenr", novel="sensesensibility"),
    "jargon": Work("jargon-text", f"{DOC}/jargon-text/jargon.txt.gz"),
    "git": Work("git-doc", f"{DOC}/git-doc/*.txt"),
    "debian_reference": Work("debian-reference-en", "usr/share/debian-reference/debian-reference.en.txt.gz"),
    "debian_policy": Work("debian-policy", f"{DOC}/debian-policy/policy.txt.gz"),
    "debian_faq": Work("debian-faq", f"{DOC}/debian/FAQ/debian-faq.en.txt.gz"),
    "python_tutorial": Work("python3.11-doc", f"{PYTHON}/tutorial/*.rst.txt"),
    "python_faq": Work("python3.11-doc", f"{PYTHON}/faq/*.rst.txt"),
    "python_reference": Work("python3.11-doc", f"{PYTHON}/reference/*.rst.txt"),
    "python_using": Work("python3.11-doc", f"{PYTHON}/using/*.rst.txt"),
    "persuasion": Work("r-cran-janeaustenr", novel="persuasion", heldout=True),
    "developers_reference": Work(
        "developers-reference", "usr/share/developers-reference/developers-reference.txt.gz", heldout=True
    ),
    "python_howto": Work("python3.11-doc", f"{PYTHON}/howto/*.rst.txt", heldout=True),
    "jinja2": Work("python3-jinja2", f"{LIBRARIES}/jinja2/*.py", code=True),
    "werkzeug": Work("python3-werkzeug", f"{LIBRARIES}/werkzeug/*.py", code=True),
    "requests": Work("python3-requests", f"{LIBRARIES}/requests/*.py", code=True),
    "networkx": Work("python3-networkx", f"{LIBRARIES}/networkx/algorithms/*.py", code=True),
    "boltons": Work("python3-boltons", f"{LIBRARIES}/boltons/*.py", heldout=True, code=True),
    "click": Work("python3-click", f"{LIBRARIES}/click/*.py", heldout=True, code=True),
    "more_itertools": Work(
        "python3-more-itertools", f"{LIBRARIES}/more_itertools/*.py", heldout=True, code=True
    ),
    "toolz": Work("python3-toolz", f"{LIBRARIES}/toolz/*.py", heldout=True, code=True),
}


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """Write pieces of natural text to OUT/train and OUT/heldout, one file per piece, and OUT/sources.json.

    With --code, OUT/train also has pieces of source code, and OUT/code has held-out pieces of other libraries' code
    and functions to find in it (kvjax.evaluate --tasks scbench_repoqa --data scbench=OUT/code).
    """

    packages: Path
    """The folder of the downloaded .deb files."""
    out: Path
    """A new folder."""
    characters: tuple[int, ...] = (6_000, 12_000)
    """The minimum numbers of characters of the pieces to train on, in turn. Pieces are whole paragraphs, so these make
    about 1,500 and 3,000 tokens."""
    heldout_characters: tuple[int, ...] = (24_000,)
    """The minimum numbers of characters of the held-out pieces, in turn."""
    code: bool = False
    """Add pieces of source code from the Python libraries."""
    code_characters: int = 9_000
    """The maximum number of characters of the context of a record with functions to find: about 2,500 tokens."""


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    config = parse_command(TextConfig, args)
    if config.out.exists():
        raise UserError(f"--out {config.out} already exists")
    check_rdata()
    selected = {name: work for name, work in WORKS.items() if config.code or not work.code}
    archives = find_archives(config.packages, selected.values())
    with tempfile.TemporaryDirectory() as unpacked:
        for package, archive in archives.items():
            unpack(archive, Path(unpacked) / package)
        files = {name: read(work, Path(unpacked) / work.package) for name, work in selected.items()}
    counts = {name: write(config, name, texts) for name, texts in files.items()}
    sources = {
        name: {
            "package": archives[work.package].name,
            "files": work.pattern or f"{NOVELS} ({work.novel})",
            "pieces": counts[name],
            "heldout": work.heldout,
        }
        for name, work in selected.items()
    }
    write_text(config.out / "sources.json", json.dumps(sources, indent=2) + "\n")
    for part in ("train", "heldout", *([CODE] if config.code else [])):
        files_written = list((config.out / part).glob("*.txt"))
        print(
            f"{config.out / part}: {len(files_written)} pieces, {sum(f.stat().st_size for f in files_written):,} bytes"
        )


def check_rdata() -> None:
    """Raise UserError if the package that reads R's data is not installed."""
    try:
        import rdata  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(
            "the novels need the package rdata, which is not installed: pip install '.[text]'"
        ) from None


def has_records(work: Work) -> bool:
    """Return True if a work has functions to find."""
    return work.code and work.heldout


def find_archives(folder: Path, works: Iterable[Work]) -> dict[str, Path]:
    """Return the .deb file of each package. Raises UserError if one is missing or there are several."""
    archives_by_package = {}
    for package in sorted({work.package for work in works}):
        archives = list(folder.glob(f"{package}_*.deb"))
        if len(archives) != 1:
            raise UserError(
                f"--packages {folder} holds {len(archives)} files {package}_*.deb, expected 1: "
                f"apt-get download {package}"
            )
        archives_by_package[package] = archives[0]
    return archives_by_package


def unpack(archive: Path, to: Path) -> None:
    """Unpack a package. Raises UserError if dpkg-deb is missing or cannot read the file."""
    try:
        subprocess.run(["dpkg-deb", "-x", archive, to], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(
            "the packages are unpacked with dpkg-deb, which this machine lacks: it is part of Debian's dpkg"
        ) from None
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split())
        raise UserError(f"{archive}: cannot be unpacked ({reason}): get it again") from None


def read(work: Work, root: Path) -> list[str]:
    """Return the texts of a work's files in an unpacked package. Raises UserError if there are none."""
    if work.novel:
        return [novel(root / NOVELS, work.novel)]
    files = sorted(root.glob(work.pattern))
    if not files:
        raise UserError(f"package {work.package} holds no {work.pattern}: another version of it?")
    return [
        (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).decode()
        for file in files
    ]


def novel(database: Path, name: str) -> str:
    """Return a character vector of R's lazy-load database as lines (`.rdx` has the place of each object in `.rdb`)."""
    from rdata.conversion import convert
    from rdata.parser import parse_data

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rdata warns of each R class that it cannot convert
        start, size = convert(parse_data(database.with_suffix(".rdx").read_bytes()))["variables"][name]
        packed = database.with_suffix(".rdb").read_bytes()[start : start + size]
        lines = convert(parse_data(zlib.decompress(packed[4:])))  # the first 4 bytes are the unpacked length
    return "\n".join(lines)


def pieces(text: str, characters: Sequence[int]) -> Iterator[str]:
    """Yield pieces of whole paragraphs. Their minimum lengths are `characters`, in turn. The rest is dropped."""
    paragraphs, size, sizes = [], 0, itertools.cycle(characters)
    minimum = next(sizes)
    for paragraph in text.split("\n\n"):
        paragraphs.append(paragraph)
        size += len(paragraph) + 2
        if size >= minimum:
            yield "\n\n".join(paragraphs).strip() + "\n"
            paragraphs, size, minimum = [], 0, next(sizes)


def write(config: TextConfig, name: str, texts: Sequence[str]) -> int:
    """Write a work's pieces and, for held-out code, its records. Return the number of pieces."""
    work = WORKS[name]
    folder = config.out / (CODE if has_records(work) else "heldout" if work.heldout else "train")
    folder.mkdir(parents=True, exist_ok=True)
    if has_records(work):
        with (folder / RECORDS).open("a", encoding="utf-8") as file:
            file.writelines(f"{record}\n" for record in code_records(texts, name, config.code_characters))
    sizes = config.heldout_characters if work.heldout else config.characters
    count = 0
    for piece in pieces("\n\n".join(texts), sizes):
        (folder / f"{name}-{count:03}.txt").write_text(piece)
        count += 1
    return count


if __name__ == "__main__":
    run_command(main)
