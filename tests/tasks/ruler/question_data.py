"""Question files in the formats of SQuAD and HotpotQA."""

from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS


def squad():
    """Return thirty articles of five paragraphs; each paragraph has two questions, one without an answer."""

    def paragraph(i, j):
        text = (
            f"In the year {1000 + 5 * i + j} the {ADJECTIVES[i]} {NOUNS[j]} was given to guild{i}x{j}. "
            + "Nobody knows why. " * ((3 * i + j) % 7)
        )
        right = {"text": f"guild{i}x{j}", "answer_start": 0}
        return {
            "context": text,
            "qas": [
                {"question": f"Who owned it after {1000 + 5 * i + j}?", "answers": [right, right]},
                {"question": "Why?", "answers": [], "is_impossible": True},
            ],
        }

    articles = [{"title": f"a{i}", "paragraphs": [paragraph(i, j) for j in range(5)]} for i in range(30)]
    return {"version": "2.0", "data": articles}


def hotpotqa():
    """Return a hundred questions with ten documents each, of which two are needed."""

    def entry(i):
        context = [
            [
                f"{NOUNS[i]} {j}",
                [f"The {ADJECTIVES[i]} {NOUNS[i]} has the mark m{i}n{j}. ", "It is old. " * (j % 4)],
            ]
            for j in range(10)
        ]
        return {
            "_id": str(i),
            "question": f"Which mark has the {ADJECTIVES[i]} one?",
            "answer": f"m{i}n3",
            "supporting_facts": [[f"{NOUNS[i]} 3", 0], [f"{NOUNS[i]} 1", 1]],
            "context": context,
        }

    return [entry(i) for i in range(100)]
