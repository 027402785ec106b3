"""LoadReport: what a load found, matched and ignored, for people to read."""

from collections.abc import Sequence
from dataclasses import dataclass

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.names import shortened, split_module, tensor_key


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What about a loaded adapter can be right or wrong in silence; `str()` is a table.

    matched    the tensors that were used, by PEFT's usual names
    unmatched  those that were passed over, by their names in the file: a load with a tensor that
               could change the result is refused, so these cannot (and a note says what they are)
    modules    rows (projection, layers, ranks, scales), each entry a sorted tuple of what occurs
    base_name  the base that the adapter says it was trained on, without private paths
    slot       where it lies in a bank, and `bank_dtype` what it was converted to there

        >>> bank.inspect("code").ranks["q_proj"], bank.inspect("code").slot
        ((4,), 0)
    """

    name: str
    source: str
    digest: str
    matched: tuple[str, ...]
    unmatched: tuple[str, ...]
    modules: tuple[tuple[str, tuple[int, ...], tuple[int, ...], tuple[float, ...]], ...]
    dtypes: dict[str, int]
    base_name: str | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    slot: int | None = None
    bank_dtype: str | None = None

    @classmethod
    def of(
        cls,
        adapter: Adapter,
        *,
        source: str = "memory",
        notes: Sequence[str] = (),
        warnings: Sequence[str] = (),
        unmatched: Sequence[str] = (),
    ) -> "LoadReport":
        warnings = list(warnings)
        if not any(pair.b.any() for pair in adapter.modules.values()):
            warnings.append("every lora_B is zero: the adapter changes nothing")
        return cls(
            name=adapter.name,
            source=source,
            digest=adapter.digest,
            matched=tuple(tensor_key(name, matrix) for name in adapter.modules for matrix in "AB"),
            unmatched=tuple(unmatched),
            modules=tuple(_row(adapter, projection) for projection in adapter.projections),
            dtypes=adapter.dtypes,
            base_name=public_base_name(adapter.config.get("base_model_name_or_path")),
            notes=tuple(notes),
            warnings=tuple(warnings),
        )

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        return {projection: ranks for projection, _, ranks, _ in self.modules}

    @property
    def scales(self) -> dict[str, tuple[float, ...]]:
        return {projection: scales for projection, _, _, scales in self.modules}

    def __str__(self) -> str:
        place = "" if self.slot is None else f" in slot {self.slot}"
        total = len(self.matched) + len(self.unmatched)
        stored = ", ".join(f"{dtype} ({count} tensors)" for dtype, count in self.dtypes.items())
        lines = [
            f"adapter {self.name!r}{place}",
            f"  source    {self.source}",
            f"  base      {self.base_name or 'not stated'}",
            f"  tensors   matched {len(self.matched)} of {total}; "
            f"unmatched: {shortened(self.unmatched) or 'none'}",
            f"  dtype     {stored}" + (f", held as {self.bank_dtype}" if self.bank_dtype else ""),
            f"  digest    sha256:{self.digest}",
            f"  {'module':<10}{'layers':>12}{'rank':>10}{'scale':>14}",
        ]
        lines += [
            f"  {projection:<10}{_ranges(layers):>12}{_span(ranks):>10}{_span(scales):>14}"
            for projection, layers, ranks, scales in self.modules
        ]
        lines += [f"  note      {text}" for text in self.notes]
        lines += [f"  WARNING   {text}" for text in self.warnings]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from molora_jax.display.tables import report_table

        return report_table(self)._repr_html_()


LOCAL_PATH = "(a path, not shown)"


def public_base_name(name: str | None) -> str | None:
    """A model id as it is; a path of the author's machine only as such, since it may be private."""
    if name is None:
        return None
    is_path = name.count("/") > 1 or name.startswith((".", "~", "/")) or set(name) & {"\\", ":"}
    return LOCAL_PATH if is_path or not name.isprintable() or len(name) > 200 else name


def _row(adapter: Adapter, projection: str):
    found = {
        split_module(name)[0]: pair
        for name, pair in adapter.modules.items()
        if split_module(name)[1] == projection
    }
    ranks = tuple(sorted({pair.rank for pair in found.values()}))
    scales = tuple(sorted({pair.scale for pair in found.values()}))
    return projection, tuple(sorted(found)), ranks, scales


def _span(values: tuple[int | float, ...]) -> str:
    return "..".join(f"{value:.6g}" for value in dict.fromkeys((values[0], values[-1])))


def _ranges(layers: tuple[int, ...]) -> str:
    first, last = layers[0], layers[-1]
    whole = len(layers) == last - first + 1
    span = f"{first}" if first == last else f"{first}..{last}"
    return span if whole else f"{len(layers)} of {span}"
