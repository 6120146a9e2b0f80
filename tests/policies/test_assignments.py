"""Arguments as people write them."""

import pytest

from kvjax.errors import UserError
from kvjax.policies.assignments import assignments, with_arguments


def test_values_are_numbers_words_and_lists():
    texts = ["a=.2", "b=2.", "c=-1e-3", "d=1E3", "e=4", "f=true", "g=null", "h=max", "i=1.2.3", "j=[1,2]"]
    texts += ["k=e5", "l=nan"]
    found = assignments(texts, "--set")
    assert found.pop("j") == [1, 2]
    assert found == {
        "a": 0.2, "b": 2.0, "c": -0.001, "d": 1000.0, "e": 4, "f": True, "g": None, "h": "max", "i": "1.2.3",
        "k": "e5", "l": "nan",
    }  # fmt: skip
    assert type(found["e"]) is int


@pytest.mark.parametrize("texts", [["a"], ["a="], ["=1"], ["1a=2"]])
def test_what_is_no_assignment_is_refused(texts):
    with pytest.raises(UserError, match=r"--set .*: expected NAME=VALUE"):
        assignments(texts, "--set")
    with pytest.raises(UserError, match="--set gives a twice"):
        assignments(["a=1", "a=2"], "--set")


def test_another_package_s_name_has_a_colon_of_its_own():
    known = ("snapkv",)
    assert with_arguments("snapkv", known) == ("snapkv", None)
    assert with_arguments("snapkv:pool=7,group=max", known) == ("snapkv", {"pool": 7, "group": "max"})
    assert with_arguments("a.b:NAME", known) == ("a.b:NAME", None)
    listed = {"observers": [1, 2], "pool": 7}
    assert with_arguments("snapkv:observers=[1,2],pool=7", known) == ("snapkv", listed)
    assert with_arguments("a.b:NAME:pool=7", known) == ("a.b:NAME", {"pool": 7})


def test_a_method_with_arguments_is_a_value_itself():
    known = ("snapkv", "adakv")
    inner = "(snapkv:observed=32,pool=7)"
    assert with_arguments(f"adakv:over=model,eviction={inner}", known) == (
        "adakv",
        {"over": "model", "eviction": inner[1:-1]},
    )
    assert with_arguments("adakv:eviction=snapkv:pool=7,over=model", known)[1] == {
        "eviction": "snapkv:pool=7",
        "over": "model",
    }
    within = f"pyramidkv:eviction={inner},beta=2"
    assert with_arguments(f"adakv:eviction=({within})", known) == ("adakv", {"eviction": within})
    assert assignments([f"eviction={inner}"], "--set") == {"eviction": inner[1:-1]}
