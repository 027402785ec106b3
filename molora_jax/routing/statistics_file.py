"""Router statistics as they travel: a small file in an adapter's folder, bound to it and a base."""

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from safetensors.numpy import save as safetensors_bytes

from molora_jax.files import StoredTensors, naming_path, read_safetensors
from molora_jax.routing.statistics import RouterStatistics

STATISTICS_FILE = "router_statistics.safetensors"
_FORMAT = "2"
_DTYPES = {"mean": "float32", "deviation": "float32", "correlation": "float16"}


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedStatistics:
    """What the file holds: means and deviations in float32, correlations in float16.

    Those are L·m²/2 numbers between −1 and 1, which so lose no more than 5e-4 each.

    base, adapter  digests of what they were gathered under and for; with other ones they mean
                   nothing
    count          tokens
    num_features   m; None: all d_model channels
    correlation    what lies below the diagonal, row by row
    """

    base: str
    adapter: str
    count: int
    d_model: int
    num_features: int | None
    mean: Float[np.ndarray, "L m"]
    deviation: Float[np.ndarray, "L m"]
    correlation: Float[np.ndarray, "L below"]

    @classmethod
    def of(
        cls, statistics: RouterStatistics, *, base_digest: str, adapter_digest: str
    ) -> "PackedStatistics":
        """Raises ValueError for statistics without a token, or of tokens that are all alike."""
        if not statistics.count:
            raise ValueError("these statistics hold no token: gather them before saving")
        mean = statistics.moments / statistics.count
        center, second = mean[:, -1, :-1], mean[:, :-1, :-1]
        covariance = second - center[:, :, None] * center[:, None, :]
        variance, size = (np.diagonal(each, axis1=1, axis2=2) for each in (covariance, second))
        deviation = np.sqrt(np.maximum(variance, 0.0))
        scale = np.where(deviation > 0, deviation, 1.0)
        correlation = covariance / (scale[:, :, None] * scale[:, None, :])
        below = np.tril_indices(correlation.shape[1], k=-1)
        correlation = correlation[:, below[0], below[1]].astype(np.float16)
        # Sums of float32 products, which leave some 1e-7 of a square.
        fits = (variance > 1e-6 * size).any(axis=1) & _are_correlations(correlation).all(axis=1)
        if not fits.all():
            raise ValueError(
                f"these statistics of {statistics.count} tokens are not saved: in layer "
                f"{int(np.argmin(fits))} features hardly differ from token to token, and what is "
                "left are rounding errors. Gather them over more text, of more kinds of tokens"
            )
        return cls(
            base=base_digest,
            adapter=adapter_digest,
            count=statistics.count,
            d_model=statistics.d_model,
            num_features=statistics.num_features,
            mean=center.astype(np.float32),
            deviation=deviation.astype(np.float32),
            correlation=correlation,
        )

    @property
    def num_bytes(self) -> int:
        """Of the arrays; the file has some hundred more."""
        return self.mean.nbytes + self.deviation.nbytes + self.correlation.nbytes

    def unpack(self) -> RouterStatistics:
        """The sums again, in float64."""
        found = RouterStatistics(len(self.mean), self.d_model, num_features=self.num_features)
        size = self.mean.shape[1]
        below = np.tril_indices(size, k=-1)
        matrix = np.zeros((len(self.mean), size, size))
        matrix[:, below[0], below[1]] = self.correlation
        matrix += np.swapaxes(matrix, 1, 2) + np.eye(size)
        mean, deviation = self.mean.astype(np.float64), self.deviation.astype(np.float64)
        second = matrix * deviation[:, :, None] * deviation[:, None, :]
        found.moments[:, :-1, :-1] = second + mean[:, :, None] * mean[:, None, :]
        found.moments[:, -1, :-1] = found.moments[:, :-1, -1] = mean
        found.moments[:, -1, -1] = 1.0
        found.moments *= self.count
        return found

    @property
    def digest(self) -> str:
        """sha256 of everything: what was damaged, or put together from two files, has another."""
        content = hashlib.sha256(
            f"{self.base} {self.adapter} {self.count} {self.d_model} {self.num_features}".encode()
        )
        for name in _DTYPES:
            content.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return content.hexdigest()

    def write(self, folder: Path | str) -> Path:
        """Writes STATISTICS_FILE into an adapter's folder, where PEFT's readers pass over it.

        A link in its place is replaced, and what it leads to stays.
        """
        arrays = {name: getattr(self, name) for name in ("mean", "deviation", "correlation")}
        metadata = {
            "format": _FORMAT,
            "count": str(self.count),
            "d_model": str(self.d_model),
            "num_features": str(self.num_features or 0),
            "base": self.base,
            "adapter": self.adapter,
            "sha256": self.digest,
        }
        path = Path(folder) / STATISTICS_FILE
        # safetensors writes buffers as they lie, whatever the strides, and picking leaves odd ones.
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        temporary = path.with_name(f".{path.name}.new-{secrets.token_hex(4)}")
        try:
            with naming_path(path):
                temporary.write_bytes(safetensors_bytes(arrays, metadata=metadata))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path


def read_packed(folder: Path | str) -> PackedStatistics:
    """What `write` wrote, of whatever base and adapter.

    Raises FileNotFoundError where there is none, ValueError where it is damaged.
    """
    path = Path(folder) / STATISTICS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {STATISTICS_FILE}: this adapter came without statistics. Gather them "
            "with gather_statistics (or `molora statistics`) on some of its own data"
        )
    stored = read_safetensors(path, where=str(path), root=folder)
    if (found := stored.metadata.get("format")) != _FORMAT:
        raise ValueError(
            f"{path}: format is {str(found)[:12]!r}, expected {_FORMAT!r}: gather the statistics "
            "anew with this version"
        )
    try:
        return _checked(stored, str(path))
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): copy it again") from None


def _checked(stored: StoredTensors, where: str) -> PackedStatistics:
    about = stored.metadata
    count, D, m = (int(about[name]) for name in ("count", "d_model", "num_features"))
    mean, deviation, correlation = (stored.get(name) for name in _DTYPES)
    dtypes = [array.dtype.name for array in (mean, deviation, correlation)]
    if dtypes != list(_DTYPES.values()):
        raise ValueError(f"arrays of {', '.join(dtypes)}, expected {', '.join(_DTYPES.values())}")
    size = m or D
    shapes = (len(mean), size), (len(mean), size), (len(mean), size * (size - 1) // 2)
    found = mean.shape, deviation.shape, correlation.shape
    if not 1 <= count < 2**53 or not 0 <= m < D or found != shapes:
        raise ValueError(
            f"arrays of shapes {', '.join(map(str, found))} over {count} tokens; expected "
            f"{', '.join(map(str, shapes))} for {m or 'all'} of {D} channels"
        )
    sound = np.isfinite(mean).all() and (deviation >= 0).all() and np.isfinite(deviation).all()
    if not (sound and _are_correlations(correlation).all()):
        raise ValueError("it has NaN, a correlation over 1 or a negative deviation")
    packed = PackedStatistics(
        base=about["base"],
        adapter=about["adapter"],
        count=count,
        d_model=D,
        num_features=m or None,
        mean=mean,
        deviation=deviation,
        correlation=correlation,
    )
    if packed.digest != about["sha256"]:
        raise ValueError("its content is not what was written: the sha256 differs")
    return packed


def _are_correlations(values: np.ndarray) -> np.ndarray:
    """Which are; rounded to float16 they may be a little over 1, and NaN is none."""
    return np.abs(values) <= 1.001


def save_statistics(
    statistics: RouterStatistics, folder: Path | str, *, base_digest: str, adapter_digest: str
) -> Path:
    """Writes STATISTICS_FILE into an adapter's folder; see `PackedStatistics`.

    Raises ValueError for statistics without a token, or of tokens that are all alike.

    >>> statistics = mj.RouterStatistics(4, 64, num_features=8)
    >>> inputs = np.random.default_rng(0).normal(size=(4, 2, 16, 64))
    >>> statistics.add(inputs, np.ones((2, 16), bool))
    >>> file = mj.save_statistics(
    ...     statistics, tmp, base_digest=base.digest, adapter_digest=code.digest
    ... )
    >>> file.parent == tmp
    True
    """
    packed = PackedStatistics.of(statistics, base_digest=base_digest, adapter_digest=adapter_digest)
    return packed.write(folder)


def load_statistics(
    folder: Path | str, *, base_digest: str, adapter_digest: str
) -> RouterStatistics:
    """Reads what `save_statistics` wrote.

    Raises FileNotFoundError where there is none, and ValueError where it is damaged, of another
    base (its features mean something else there) or of another adapter.

        >>> statistics = mj.RouterStatistics(4, 64, num_features=8)
        >>> inputs = np.random.default_rng(0).normal(size=(4, 2, 16, 64))
        >>> statistics.add(inputs, np.ones((2, 16), bool))
        >>> whose = {"base_digest": base.digest, "adapter_digest": code.digest}
        >>> folder = mj.save_adapter(code, tmp / "code")
        >>> _ = mj.save_statistics(statistics, folder, **whose)
        >>> mj.load_statistics(folder, **whose).count
        32
    """
    packed = read_packed(folder)
    for field, expected in {"base": base_digest, "adapter": adapter_digest}.items():
        if (found := getattr(packed, field)) != expected:
            raise ValueError(
                f"{Path(folder) / STATISTICS_FILE}: {field} is {found[:12]!r}, expected "
                f"{expected[:12]!r}: these statistics belong to another {field}. Gather them anew"
            )
    return packed.unpack()
