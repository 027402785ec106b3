"""What a composition's router does with a text, token by token, and what other choices cost."""

import dataclasses
import hashlib
import pathlib

from experiments.registry import check_config, place, texts

# Arithmetic, code, an encyclopedia and a play, as in `compose`: the right adapter changes inside.
MIXED_TEXT = """\
Question: A shop sells pencils in boxes of 12. Maya buys 5 boxes and gives 17 pencils to her \
class. How many pencils does she have left?
Answer: Maya buys 5 * 12 = 60 pencils. She has 60 - 17 = 43 pencils left. #### 43

def pencils_left(boxes, per_box, given):
    \"\"\"Number of pencils after some are given away.\"\"\"
    total = boxes * per_box
    if given > total:
        raise ValueError(f"cannot give {given} of {total}")
    return total - given

The castle was built in 1284 on a low hill above the river and served as a royal residence until \
the seventeenth century , when most of its outer walls were taken down .

KING: What news, good cousin? Speak, and be not slow;
The night grows old, and I would hear it all.
MESSENGER: My lord, thy brother's army is o'erthrown.

KING: If 3 men build 12 walls in 4 days, how many walls do 6 men build? Answer: I shall tell thee, \
my lord: 12 * 2 = <<12*2=24>>24, that is, return sum(walls[i] for i in range(n)).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One look at a composition.

    composition    folder that Composition.save wrote, such as `composition` in a run of compose
    compare        another composition on the same base, shown beside it
    compare_top_k  the same router with another number of adapters a token, shown beside it; give
                   one of the two at most
    base           base model; empty: the one that the composition names
    texts          a text, or several; with text_files empty too: a built-in one of four domains
    text_files     files of text, one text each, after `texts`
    forced         also read the texts with every token at one adapter, for each, and at none
    seed           of nothing: an analysis draws no random number
    """

    composition: str = place()
    compare: str = place()
    compare_top_k: int | None = None
    base: str = ""
    texts: str | tuple[str, ...] = texts()
    text_files: tuple[str, ...] = place(())
    forced: bool = True
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        if isinstance(self.texts, str):  # one text and a list of it are the same run
            object.__setattr__(self, "texts", (self.texts,))
        if not self.composition:
            raise ValueError(
                "Config.composition is empty: name a composition's folder, as in "
                "composition=runs/compose/ID/composition"
            )
        if self.compare and self.compare_top_k is not None:
            raise ValueError(
                f"Config.compare = {self.compare!r} and Config.compare_top_k = "
                f"{self.compare_top_k}: give one, two routers are shown at most"
            )
        from molora_jax.files import near_path

        for field in ("composition", "compare"):
            value = getattr(self, field)
            if value and not (pathlib.Path(value) / "molora.json").is_file():
                raise ValueError(
                    f"Config.{field} = {value!r}: there is no composition (a folder with "
                    f"molora.json, as Composition.save writes it){near_path(value)}"
                )
        for index, text in enumerate(self.given_texts()):
            if not text:
                raise ValueError(f"Config.texts[{index}] is empty: give a text to read")
        for path in self.text_files:
            if not pathlib.Path(path).is_file():
                raise ValueError(
                    f"Config.text_files names {path!r}: there is no such file{near_path(path)}"
                )

    def given_texts(self) -> tuple[str, ...]:
        """Those of `texts`, or the built-in one where nothing was given."""
        return tuple(self.texts) if self.texts or self.text_files else (MIXED_TEXT,)

    def all_texts(self) -> list[str]:
        """Every text to read, files last; ValueError for a file that is empty or no text."""
        found = list(self.given_texts())
        for path in self.text_files:
            try:
                text = pathlib.Path(path).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"Config.text_files: {path} is no UTF-8 text: {error}") from None
            if not text:
                raise ValueError(f"Config.text_files: {path} is empty: give a text to read")
            found.append(text)
        return found


def digests(config: Config) -> dict[str, str]:
    """Of the composition, the one beside it, the base and what is read."""
    from molora_jax.adapters.composition_record import read_record
    from molora_jax.models import base_digest

    folders = {"composition": config.composition, "compare": config.compare}
    records = {name: read_record(pathlib.Path(path)) for name, path in folders.items() if path}
    name = config.base or records["composition"].base_name
    if name is None:
        raise ValueError(
            f"Config.base is empty, and the base of {config.composition!r} was a folder or file, "
            "whose place is not saved: name it, as in base=PATH"
        )
    texts = hashlib.sha256("\0".join(config.all_texts()).encode("utf-8", "backslashreplace"))
    return {
        "base": base_digest(name),
        "texts": texts.hexdigest(),
        **{each: record.sha256 for each, record in records.items()},
    }


def main(config: Config, run) -> None:
    from experiments import analyse_report
    from molora_jax.analysis import analyse

    base, compositions = load(config)
    found = analyse(base, config.all_texts(), compositions, forced=config.forced)
    analyse_report.write_tables(found, base.name, run.path)
    analyse_report.draw(found, base.name, run.path)
    run.finish(
        metrics=analyse_report.metrics(found),
        report=analyse_report.markdown(found, config, base.name),
    )


def load(config: Config):
    """The base, and the compositions to show by their names there."""
    from molora_jax.adapters import Composition
    from molora_jax.adapters.composition_record import read_record
    from molora_jax.models import load_base

    base = load_base(config.base or read_record(pathlib.Path(config.composition)).base_name)
    first = Composition.load(config.composition, base)
    if config.compare:
        names = labels(config.composition, config.compare)
        other = Composition.load(config.compare, base)
        return base, dict(zip(names, (first, other), strict=True))
    if config.compare_top_k is None:
        return base, {labels(config.composition)[0]: first}
    if not hasattr(first.router, "with_top_k"):
        raise ValueError(
            f"Config.compare_top_k = {config.compare_top_k}: a {type(first.router).__name__} has "
            "no other number of adapters a token; compare with another composition instead"
        )
    other = dataclasses.replace(first, router=first.router.with_top_k(config.compare_top_k))
    names = [f"k = {each.router.top_k}" for each in (first, other)]
    if names[0] == names[1]:
        raise ValueError(
            f"Config.compare_top_k = {config.compare_top_k} is what the router has already: give "
            "another number"
        )
    return base, dict(zip(names, (first, other), strict=True))


def labels(*paths: str) -> list[str]:
    """Short names of folders: what tells them apart, else A and B."""
    names = [pathlib.Path(path).resolve() for path in paths]
    for depth in (1, 2, 3):
        shown = [
            "/".join(each for each in name.parts[-depth:] if each != "composition")
            for name in names
        ]
        if all(shown) and len(set(shown)) == len(shown):
            return shown
    return ["A", "B"][: len(paths)]
