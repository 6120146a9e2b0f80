"""Arguments of evaluations of the test-size model, and a row of RULER's own data."""

from kvjax.builtin import builtin_model

TEST_MODEL = ["--model", str(builtin_model("test_model")), "--dtype", "float32"]
SMALL = [*TEST_MODEL, "--context", "126", "--samples", "3", "--chunk", "32", "--observed", "4"]


def fact(number):
    """Return a row of RULER's own data, of about 100 tokens."""
    text = f"The owl of house {number} is grey and sits on a branch.\nQuestion: Is the owl grey?\nAnswer:"
    return {"input": text, "outputs": ["e"], "length": 9}
