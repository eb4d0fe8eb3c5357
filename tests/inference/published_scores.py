"""What lmms-eval makes of answers: with it installed, `python published_scores.py` writes published_scores.json.

Of lmms-eval 0.7.3; MMMU's answers that name no option are left out, since a random one is taken for them there.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

PUBLISHED = Path(__file__).with_suffix(".json")
COUNT = 50
OPTIONS = {"A": "a red ball", "B": "two dogs", "C": "Nothing at all", "D": "a dog"}
FORMS = (
    "{c}", "{c}.", "({c})", "{c})", "The answer is {c}.", "The answer is ({c}).", "Option {c}: {t}", "{t}",
    "I see {t} here",
    "A picture of {t}", "A or {c}", "{c}, {o}", "It is {t}, not {u}", "Answer:{c}", "Answer :{c}.", "none", "A",
    "The first is ({o}) but the right one must be ({c})", "There is {u}, and later there is {t} in it", "e", "E",
)  # fmt: skip
NUMBERS = (
    "12",
    "12.5",
    "11.9",
    "0",
    "50%",
    "0.51",
    "52%",
    "1,200",
    "1200",
    "twelve",
    "Twelve",
    "-3",
    "-3.1",
    "",
)
YES_NO = (
    "Yes", "no", "Yes.", "NO, it is not", "y", "n", "Y.", "maybe", "I know", "not yes", "yes it is", "", "no.",
)  # fmt: skip


def of_task(file: str) -> ModuleType:
    """Load a file of lmms-eval's tasks by itself, without what all the others import."""
    (package,) = importlib.util.find_spec("lmms_eval").submodule_search_locations
    spec = importlib.util.spec_from_file_location("task", Path(package, "tasks", file))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Draw answers, and write them with what lmms-eval makes of each."""
    last_letter = of_task("_task_utils/mmmu_mcq_utils.py").parse_mmmu_multi_choice_response
    relaxed_correctness = of_task("chartqa/utils.py").relaxed_correctness
    matcher = of_task("mmbench/mmbench_evals.py").MMBench_Evaluator()
    mme = of_task("mme/utils.py")
    drawn = random.Random(0)
    published: dict[str, list] = {"chosen_option": [], "last_option": []}
    while any(len(rows) < COUNT for rows in published.values()):
        c, o = drawn.sample("ABCD", 2)
        text = drawn.choice(FORMS).format(c=c, o=o, t=OPTIONS[c], u=OPTIONS[o])
        published["chosen_option"].append([text, matcher.can_infer(text, dict(OPTIONS)) or ""])
        found = {last_letter(text, [*OPTIONS], OPTIONS) for _ in range(40)}
        if len(found) == 1:
            published["last_option"].append([text, *found])
    pairs = [(drawn.choice(NUMBERS), drawn.choice(NUMBERS)) for _ in range(COUNT)]
    published["relaxed_match"] = [[*pair, relaxed_correctness(*pair)] for pair in pairs]
    rows = []
    for number in range(COUNT):
        category = ("OCR", "count", "code_reasoning")[number // 2 % 3]
        answer = "Yes" if number % 2 else "No"
        rows.append([category, str(number // 2), answer, drawn.choice((*YES_NO, answer, answer))])
    replies = [
        (c, {"category": c, "question_id": n, "score": float(mme.parse_pred_ans(p) == a.lower())})
        for c, n, a, p in rows
    ]
    scores = {
        group: mme.mme_aggregate_results(
            [r for c, r in replies if (c == "code_reasoning") == cognition]
        )
        for group, cognition in (("perception", False), ("cognition", True))
    }
    published["mme"] = [rows, scores]
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in published.items())
    PUBLISHED.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
