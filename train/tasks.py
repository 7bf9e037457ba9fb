"""Deterministic practice problems: arithmetic stories, small functions, JSON records.

Every problem has one canonical answer, fixed by its prompt, so that a very small model
can learn to give it exactly.  Templates are data: a format string for the prompt, a small
program or record for the answer, and slots which are filled from the pools below.

A problem is held out by a hash of its key ``(kind, template, numbers)`` and nothing else, so
no held-out combination of a template and its values can be in training, whatever the seeds.
``numbers`` holds the numbers of a "word" story alone (names and objects do not change the
work), and every slot value of "code" and "json": constants, names and words.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

KINDS = ("word", "code", "json")
SPLITS = ("train", "held_out")
_WEIGHTS = {"word": 2, "code": 1, "json": 1}
_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Problem:
    """One problem: its kind, template id, key values, prompt and canonical answer."""

    kind: str
    template: str
    numbers: tuple
    prompt: str
    answer: str


# Kept as tables: with one entry a line, the templates would drown in brackets.
# fmt: off
_WORDS = {
    "name": "Anna Ben Carl Dora Emma Finn Gina Hugo Iris Jack Kate Liam Mia Noah Olga Paul",
    "obj": "apples books cards coins cups eggs flowers hats keys lemons pens plums shells stamps stones toys",
    "city": "Paris London Rome Berlin Madrid Oslo Vienna Dublin", "job": "teacher doctor baker driver farmer writer",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday", "sky": "sunny cloudy rainy windy",
    "color": "red blue green black white yellow", "pet": "dog cat bird horse rabbit fish",
    "verb": "get make find compute apply run", "noun": "score price total value level count size weight",
    "x": "x n number amount points", "xs": "items values numbers data",
}
# A slot's pool is its name without trailing digits; slots of one pool get distinct values.
_POOLS: dict[str, Sequence] = {pool: words.split() for pool, words in _WORDS.items()} | {
    "age": range(18, 80), "n": range(2, 60), "hour": range(8, 20), "k": range(2, 10), "m": range(11, 31),
}

# (id, slot ranges, steps "result = left op right", prompt, a text for each step in which
# {work} is where the equations go, "words: wording 1; wording 2; ..."); one template a wording.
_STORIES: tuple[tuple[str, dict[str, tuple[int, int]], tuple[str, ...], str, tuple[str, ...], str], ...] = (
    ("add_sub", {"a": (12, 60), "b": (11, 39), "c": (3, 21)}, ("x = a + b", "y = x - c"),
     ("{name1} has {a} {obj1}. {name1} {gain} {b} more {obj1} {where}. Then {name1} {lose} {c} "
      "{obj1}. How many {obj1} does {name1} have now?"),
     ("{name1} has {a} {obj1} and {gain} {b} more {obj1} {where}. {work} Now {name1} has {x} {obj1}.",
      "Then {name1} {lose} {c} {obj1}. {work} Now {name1} has {y} {obj1}."),
     "gain, where, lose: buys, at the shop, sells; finds, in the park, loses; gets, at school, gives away"),
    ("mul_add", {"a": (2, 9), "b": (11, 25), "c": (5, 40)}, ("x = a * b", "y = x + c"),
     ("{name1} has {a} {box}. There are {b} {obj1} in each of the {box}. {name1} {gain} {c} more "
      "{obj1}. How many {obj1} does {name1} have in all?"),
     ("There are {a} {box} with {b} {obj1} in each. {work} The {box} hold {x} {obj1}.",
      "{name1} {gain} {c} more {obj1}. {work} In all {name1} has {y} {obj1}."),
     "box, gain: bags, finds; boxes, buys; baskets, gets"),
    ("mul_sub", {"a": (3, 9), "b": (11, 25), "c": (4, 30)}, ("x = a * b", "y = x - c"),
     ("{name1} fills {a} {box} with {b} {obj1} in each. Then {name2} {take} {c} of the {obj1}. "
      "How many {obj1} are left in the {box}?"),
     ("{name1} fills {a} {box} with {b} {obj1} in each. {work} The {box} hold {x} {obj1}.",
      "{name2} {take} {c} of the {obj1}. {work} There are {y} {obj1} left in the {box}."),
     "box, take: bags, takes; boxes, sells; jars, loses"),
    ("two_prices", {"a": (2, 9), "p": (2, 9), "b": (2, 9), "q": (2, 9)}, ("x = a * p", "y = b * q", "z = x + y"),
     ("{name1} buys {a} {obj1} for {p} {coin} each and {b} {obj2} for {q} {coin} each {where}. "
      "How many {coin} does {name1} pay in all?"),
     ("{a} {obj1} cost {p} {coin} each. {work} The {obj1} cost {x} {coin}.",
      "{b} {obj2} cost {q} {coin} each. {work} The {obj2} cost {y} {coin}.",
      "We add the two costs. {work} In all {name1} pays {z} {coin}."),
     "coin, where: dollars, at the shop; euros, at the market; pounds, at school"),
    ("add_mul", {"a": (4, 19), "b": (3, 9), "c": (3, 9)}, ("x = a + b", "y = c * x"),
     ("Every day {name1} {act} {a} {obj1} in the morning and {b} {obj1} in the evening {where}. "
      "How many {obj1} does {name1} have after {c} days?"),
     (("Every day {name1} {act} {a} {obj1} in the morning and {b} {obj1} in the evening. {work} "
       "In one day {name1} {act} {x} {obj1}."),
      "There are {c} days with {x} {obj1} each. {work} After {c} days {name1} has {y} {obj1}."),
     "act, where: finds, in the park; buys, at the market; makes, at work"),
    ("change", {"a": (2, 6), "p": (3, 9), "q": (5, 30)}, ("x = a * p", "y = x + q", "z = 100 - y"),
     ("{name1} has 100 {coin}. {name1} buys {a} {obj1} for {p} {coin} each and {thing} for {q} "
      "{coin}. How many {coin} does {name1} have left?"),
     ("{a} {obj1} cost {p} {coin} each. {work} The {obj1} cost {x} {coin}.",
      "The cost of {thing} is {q} {coin}. {work} {name1} pays {y} {coin}.",
      "{name1} has 100 {coin}. {work} {name1} has {z} {coin} left."),
     "coin, thing: dollars, a bag; euros, a box; pounds, a book"),
    ("times", {"a": (6, 30), "k": (2, 5), "c": (3, 15)}, ("x = k * a", "y = x + a", "z = y - c"),
     ("{name1} has {a} {obj1}. {name2} has {k} times as many {obj1}. Together they {lose} {c} "
      "{obj1} {where}. How many {obj1} do they have left?"),
     ("{name2} has {k} times {a} {obj1}. {work}", "Together they have both. {work}",
      "They {lose} {c} {obj1}. {work} They have {z} {obj1} left."),
     "lose, where: sell, at the market; lose, in the park; give away, at school"),
    ("compare", {"a": (12, 50), "b": (11, 40), "c": (3, 21)}, ("x = a + b", "y = x - c"),
     ("{name1} {has} {a} {obj1} {where}. {name2} {has} {b} more than {name1}. {name3} {has} {c} "
      "less than {name2}. How many {obj1} does {name3} have?"),
     ("{name1} {has} {a} {obj1} and {name2} {has} {b} more. {work} So {name2} {has} {x} {obj1}.",
      "{name3} {has} {c} less than {name2}. {work} So {name3} {has} {y} {obj1}."),
     "has, where: has, at work; finds, in the park; makes, at school"),
)

# (id, arguments, what it does, body, argument lists of the two examples); a body or example
# may use the slots of the arguments and the description only, as the prompt shows no others.
_CODE: tuple[tuple[str, str, str, str, tuple[str, str]], ...] = (
    ("scale_shift", "{x1}", "multiplies {x1} by {k1} and then adds {m}",
     "out = {x1} * {k1}\nout = out + {m}\nreturn out", ("0", "1")),
    ("at_least", "{x1}", "gives back {x1} but never less than {m}",
     "out = {x1}\nif out < {m}:\n    out = {m}\nreturn out", ("5", "50")),
    ("clamp", "{x1}", "keeps {x1} between {k1} and {m}",
     "if {x1} < {k1}:\n    return {k1}\nif {x1} > {m}:\n    return {m}\nreturn {x1}", ("0", "50")),
    ("bonus", "{x1}", "adds {k1} to {x1} if it is more than {m}",
     "out = {x1}\nif {x1} > {m}:\n    out = out + {k1}\nreturn out", ("0", "40")),
    ("add_two", "{x1}, {x2}", "adds {x1} and {x2} and then adds {m}",
     "out = {x1} + {x2}\nout = out + {m}\nreturn out", ("0, 0", "1, 2")),
    ("count_above", "{xs}", "counts the {xs} that are more than {m}",
     "count = 0\nfor item in {xs}:\n    if item > {m}:\n        count = count + 1\nreturn count",
     ("[5]", "[40, 50]")),
    ("keep_above", "{xs}", "makes a list of the {xs} that are more than {m}",
     "out = []\nfor item in {xs}:\n    if item > {m}:\n        out.append(item)\nreturn out", ("[5]", "[5, 40]")),
    ("scale_all", "{xs}", "makes a list of the {xs} with each item multiplied by {k1}",
     "out = []\nfor item in {xs}:\n    out.append(item * {k1})\nreturn out", ("[1]", "[1, 0]")),
    ("sum_from", "{xs}", "adds up all the {xs} and starts the sum at {m}",
     "out = {m}\nfor item in {xs}:\n    out = out + item\nreturn out", ("[]", "[1, 2]")),
    ("is_multiple", "{x1}", "checks if {x1} is a multiple of {m}",
     "rest = {x1} % {m}\nif rest == 0:\n    return True\nreturn False", ("{m}", "1")),
    ("larger", "{x1}, {x2}", "takes the larger of {x1} and {x2} and multiplies it by {k1}",
     "out = {x1}\nif {x2} > out:\n    out = {x2}\nreturn out * {k1}", ("1, 0", "0, 1")),
    ("distance", "{x1}, {x2}", "finds the distance from {x1} to {x2} and adds {m}",
     "out = {x1} - {x2}\nif out < 0:\n    out = {x2} - {x1}\nreturn out + {m}", ("1, 1", "0, 1")),
    ("first_items", "{xs}", "makes a list of the first {k1} of the {xs}",
     "out = []\nfor item in {xs}:\n    if len(out) < {k1}:\n        out.append(item)\nreturn out", ("[]", "[{k1}, 1]")),
    ("grade", "{x1}", "gives the word high if {x1} is more than {m}, or else the word low",
     'out = "low"\nif {x1} > {m}:\n    out = "high"\nreturn out', ("5", "40")),
    ("steps", "{x1}", "adds {k1} to {x1} again and again until it is at least {m}",
     "out = {x1}\nwhile out < {m}:\n    out = out + {k1}\nreturn out", ("{m}", "40")),
    ("cost", "{x1}, {x2}", "multiplies {x1} by {x2} and adds {m} if {x2} is more than {k1}",
     "out = {x1} * {x2}\nif {x2} > {k1}:\n    out = out + {m}\nreturn out", ("1, 0", "0, 10")),
)

# (id, facts, record, indent); a record's words that begin with "$" are slots.  Every record
# starts with "type" (the id) and "text" (the facts).
_JSON: tuple[tuple[str, str, dict[str, Any], int | None], ...] = (
    ("person", ("{name1} is {age} years old and lives in {city1}. {name1} works as a {job}, likes "
      "{obj1} and has a {color} {pet}."),
     {"name": "$name1", "age": "$age", "city": "$city1", "job": "$job", "likes": "$obj1",
      "pet": {"type": "$pet", "color": "$color"}}, 2),
    ("order", "{name1} from {city1} orders {n1} {obj1} for {n2} dollars and {n3} {obj2} for {n4} dollars.",
     {"name": "$name1", "items": [{"name": "$obj1", "count": "$n1", "price": "$n2"},
                                  {"name": "$obj2", "count": "$n3", "price": "$n4"}]}, 2),
    ("shop", "A shop in {city1} sells {obj1}, {obj2} and {obj3}. It has {n1} {obj1}, {n2} {obj2} and {n3} {obj3}.",
     {"city": "$city1", "items": ["$obj1", "$obj2", "$obj3"],
      "counts": {"$obj1": "$n1", "$obj2": "$n2", "$obj3": "$n3"}}, 2),
    ("meeting", ("{name1} and {name2} have a meeting in {city1} on {day1} at {hour}. It costs {n1} "
      "dollars and {name3} is the guest."),
     {"names": ["$name1", "$name2"], "guest": "$name3", "city": "$city1", "day": "$day1",
      "hour": "$hour", "price": "$n1"}, 2),
    ("game", ("{name1} and {name2} play a game on {day1} in {city1}. {name1} has {n1} points and "
      "{name2} has {n2} points."),
     {"day": "$day1", "city": "$city1", "players": [{"name": "$name1", "points": "$n1"},
                                                    {"name": "$name2", "points": "$n2"}]}, 2),
    ("trip", ("{name1} goes from {city1} to {city2} on {day1} and comes back on {day2}. The trip "
      "costs {n1} dollars and {name1} takes {n2} {obj1}."),
     {"name": "$name1", "from": {"city": "$city1", "day": "$day1"}, "to": {"city": "$city2",
      "day": "$day2"}, "price": "$n1", "items": {"name": "$obj1", "count": "$n2"}}, None),
    ("team", ("The {color} team from {city1} has {n1} points. {name1} leads the team, and {name2} "
      "and {name3} are in the team. They play on {day1}."),
     {"color": "$color", "city": "$city1", "points": "$n1", "leader": "$name1",
      "names": ["$name1", "$name2", "$name3"], "day": "$day1"}, 2),
    ("weather", ("On {day1} it is {sky1} in {city1} with {n1} degrees. On {day2} it is {sky2} in "
      "{city1} with {n2} degrees."),
     {"city": "$city1", "days": [{"day": "$day1", "sky": "$sky1", "degrees": "$n1"},
                                 {"day": "$day2", "sky": "$sky2", "degrees": "$n2"}]}, None),
    ("gift", "{name1} gives {name2} {n1} {color1} {obj1}, and {name2} gives {name1} {n2} {color2} {obj2}.",
     {"gifts": [{"from": "$name1", "item": "$obj1", "color": "$color1", "count": "$n1"},
                {"from": "$name2", "item": "$obj2", "color": "$color2", "count": "$n2"}]}, None),
    ("jobs", ("{name1} is a {job1} in {city1} and works until {hour}. {name2} is a {job2} in "
      "{city2} and works on {day}."),
     {"workers": [{"name": "$name1", "job": "$job1", "city": "$city1", "until": "$hour"},
                  {"name": "$name2", "job": "$job2", "city": "$city2", "day": "$day"}]}, 2),
)
# fmt: on


def held_out(problem: Problem) -> bool:
    """Whether the problem's key ``(kind, template, numbers)`` is among the ~5% held out."""
    return _key_held_out(problem.kind, problem.template, problem.numbers)


def problems(seed: int, *, split: Literal["train", "held_out"], kinds: Sequence[str] = KINDS) -> Iterator[Problem]:
    """Endless problems of one split, the same for the same arguments.

    Kinds are mixed 2 : 1 : 1 for "word", "code" and "json", among those asked for; each
    template of a kind is equally likely.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an int, not {seed!r}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    if isinstance(kinds, str) or not kinds or any(kind not in KINDS for kind in kinds):
        raise ValueError(f"kinds must be a non-empty sequence of {KINDS}, not {kinds!r}")
    # A generator's own checks would wait for its first item, so the stream is apart.
    return _stream(seed, split == "held_out", tuple(k for k in KINDS if k in kinds))


def solved(problem: Problem, text: str) -> bool:
    """Whether a completion solves the problem.

    "word" compares the number after the last "The answer is", "json" the parsed values,
    "code" the source text up to surrounding space.
    """
    if problem.kind == "word":
        found = _final_number(text)
        return found is not None and found == _final_number(problem.answer)
    if problem.kind == "json":
        try:  # dumped again, since Python's 1 == True == 1.0 are three values in JSON
            a, b = (json.dumps(json.loads(t), sort_keys=True) for t in (text, problem.answer))
        except (ValueError, RecursionError):
            return False
        return a == b
    if problem.kind == "code":
        return text.strip() == problem.answer.strip()
    raise ValueError(f"problem.kind must be one of {KINDS}, not {problem.kind!r}")


def _final_number(text: str) -> str | None:
    found = re.findall(r"The answer is (-?[0-9]+)(?![0-9]|[.,][0-9])", text)
    return found[-1] if found else None


def _key_held_out(kind: str, template: str, numbers: tuple) -> bool:
    # hashlib, since hash() of a string differs from one process to the next.
    digest = hashlib.sha256(repr((kind, template, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def _stream(seed: int, want_held_out: bool, kinds: tuple[str, ...]) -> Iterator[Problem]:
    rng = random.Random(f"problems {seed}")  # a str, as Random(-1) equals Random(1)
    makers = {"word": _word, "code": _code, "json": _json}
    weights = [_WEIGHTS[kind] for kind in kinds]
    while True:
        kind = rng.choices(kinds, weights)[0]
        problem = None
        # Tried again within the kind, so that rejection does not move the mix of kinds.
        while problem is None:
            problem = makers[kind](rng, want_held_out)
        yield problem


def _draw(rng: random.Random, *formats: str) -> dict[str, Any]:
    """A value for every slot named in the formats, distinct within each pool."""
    values: dict[str, Any] = {}
    for pool, slots in _slots(formats).items():
        values |= zip(slots, rng.sample(_POOLS[pool], len(slots)), strict=True)
    return values


@cache  # held-out problems are found by rejection, some twenty draws for each
def _slots(formats: tuple[str, ...]) -> dict[str, list[str]]:
    pools: dict[str, list[str]] = {}
    for slot in sorted(set(re.findall(r"\{(\w+)\}", " ".join(formats)))):
        if (pool := slot.rstrip("0123456789")) in _POOLS:
            pools.setdefault(pool, []).append(slot)
    return pools


def _word(rng: random.Random, want_held_out: bool) -> Problem | None:
    name, ranges, steps, prompt, texts, table = rng.choice(_STORIES)
    fields, *wordings = re.split(": |; ", table)
    row = rng.randrange(len(wordings))
    template = f"{name}/{row + 1}"
    numbers = {slot: rng.randint(*bounds) for slot, bounds in ranges.items()}
    if _key_held_out("word", template, tuple(numbers.values())) != want_held_out:
        return None
    # The numbers come after the draw: "k" is a pool of the other kinds too.
    values = _draw(rng, prompt) | numbers
    values |= zip(fields.split(", "), wordings[row].split(", "), strict=True)
    lines = [f"Let us solve this in {len(steps)} steps."]
    for index, (step, text) in enumerate(zip(steps, texts, strict=True), 1):
        result, _, left, op, right = step.split()
        a, b = (int(values.get(term, term)) for term in (left, right))
        values[result], values["work"] = _work(a, op, b)
        lines.append(f"Step {index}: {text.format_map(values)}")
    lines.append(f"The answer is {values[result]}.")
    answer = "\n".join(lines)
    return Problem("word", template, tuple(numbers.values()), prompt.format_map(values), answer)


def _work(a: int, op: str, b: int) -> tuple[int, str]:
    """The result and the equations; a two-digit ``b`` is taken as tens, then ones."""
    whole = {"+": a + b, "-": a - b, "*": a * b}[op]
    tens, ones = b - b % 10, b % 10
    if not tens or not ones:
        return whole, f"{a} {op} {b} = {whole}."
    if op == "*":
        x, y = a * tens, a * ones
        return whole, f"{a} * {tens} = {x}. {a} * {ones} = {y}. {x} + {y} = {whole}."
    part = a + tens if op == "+" else a - tens
    return whole, f"{a} {op} {tens} = {part}. {part} {op} {ones} = {whole}."


def _code(rng: random.Random, want_held_out: bool) -> Problem | None:
    template, args, what, body, examples = rng.choice(_CODE)
    values = _draw(rng, "{verb}_{noun}", args, what)
    numbers = tuple(values.values())
    if _key_held_out("code", template, numbers) != want_held_out:
        return None
    name = "{verb}_{noun}".format_map(values)
    args, what = args.format_map(values), what.format_map(values)
    prompt = f"Write a Python function {name}({args}) that {what}. Give two examples."
    lines = [f"# Here is the function {name}({args}). It {what}."]
    lines += [f"def {name}({args}):", f'    """This function {what}."""']
    lines += ["    " + line for line in body.format_map(values).split("\n")]
    # The examples' results come from running the function: never out of step with it.
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    lines += ["", "# Examples:"]
    for example in examples:
        call = f"{name}({example.format_map(values)})"
        lines.append(f"# {call} == {eval(call, scope)!r}")
    return Problem("code", template, numbers, prompt, "\n".join(lines))


def _json(rng: random.Random, want_held_out: bool) -> Problem | None:
    template, facts, record, indent = rng.choice(_JSON)
    values = _draw(rng, facts)
    numbers = tuple(values.values())
    if _key_held_out("json", template, numbers) != want_held_out:
        return None
    text = facts.format_map(values)
    prompt = f"{text} Write this as JSON{' on one line' if indent is None else ''}."
    full = {"type": template, "text": text} | _fill(record, values)
    return Problem("json", template, numbers, prompt, json.dumps(full, indent=indent))


def _fill(node: Any, values: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        return {_fill(key, values): _fill(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_fill(item, values) for item in node]
    return values[node[1:]] if node.startswith("$") else node
