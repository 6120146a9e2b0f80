"""Test the table of several evaluations."""

import json

import pytest

from kvjax.errors import UserError
from train.claims import main

OTHERS = {
    "described": "", "metric": "", "contexts": "", "choice": "", "context": 1024, "samples": 1, "footprint": 1.0,
    "footprint_held": 1.0, "peak_kv": 1.0, "kv_ratio": 1.0, "bytes": 0, "by_kind": {}, "kept": [], "perplexity": None,
    "prefill_tok_s": None, "decode_tok_s": None, "gates": None, "tau": None, "question_aware": False,
    "published": False,
}  # fmt: skip
"""Fields of a result that the table does not show."""


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a folder of results: (policy, `sized_by`, budget, task, seed, score)."""

    def write(name, *results):
        folder = tmp_path / name
        folder.mkdir()
        lines = []
        for result in results:
            given = dict(zip(("policy", "sized_by", "budget", "task", "seed", "score"), result, strict=True))
            lines.append(json.dumps(OTHERS | given))
        (folder / "results.jsonl").write_text("\n".join(lines) + "\n")
        return str(folder)

    return write


def rows(capsys, args):
    main(args)
    return [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]


def test_a_table_has_means_over_seeds_with_the_smallest_and_the_largest(write, capsys):
    folders = [
        write(
            "dense-0", ("full", "nothing", 1.0, "recall", 0, 1.0), ("full", "nothing", 1.0, "copy", 0, 0.8)
        ),
        write(
            "dense-1", ("full", "nothing", 1.0, "recall", 1, 1.0), ("full", "nothing", 1.0, "copy", 1, 0.5)
        ),
        write(
            "own-0", ("WG-KV", "budget", 0.25, "recall", 0, 0.4), ("WG-KV", "budget", 0.25, "copy", 0, 0.4)
        ),
        write(
            "own-1", ("WG-KV", "budget", 0.25, "recall", 1, 0.6), ("WG-KV", "budget", 0.25, "copy", 1, 0.4)
        ),
        write("gates", ("wgkv", "λ", 0.08, "recall", 1, 0.3)),
    ]
    head = ["budget", "method", "recall", "copy", "mean"]
    assert rows(capsys, folders) == [
        head,
        ["---"] * 5,
        ["–", "full", "100", "65 (50–80)", "82 (75–90)"],
        ["0.25", "WG-KV", "50 (40–60)", "40", "45 (40–50)"],
        ["λ 0.08", "wgkv", "30", "–", "–"],
    ]
    # relative to each seed's own full cache: 50 and 80% for copy
    assert rows(capsys, [*folders, "--relative-to", "full"])[2:4] == [
        ["–", "full", "100", "100", "100"],
        ["0.25", "WG-KV", "50 (40–60)", "65 (50–80)", "58 (45–70)"],
    ]


def test_results_that_make_no_table_are_refused(write, tmp_path):
    folder = write("one", ("full", "nothing", 1.0, "recall", 0, 1.0))
    same_results = write("two", ("full", "nothing", 1.0, "recall", 0, 1.0))
    for args, message in (
        ([folder, same_results], "full on recall with seed 0 is in another folder, too"),
        ([], "got no folder"),
        ([str(tmp_path)], "got no results.jsonl"),
        ([folder, "--relative-to", "dense"], "got 0 rows of this label, expected 1"),
        (
            [folder, write("three", ("wgkv", "λ", 0.1, "recall", 1, 1.0)), "--relative-to", "full"],
            "no score, or 0",
        ),
    ):
        with pytest.raises(UserError, match=message):
            main(args)
