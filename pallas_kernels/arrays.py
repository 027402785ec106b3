"""Names for annotations; the kernels run where jax and numpy are all there is."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int
else:
    try:
        from jaxtyping import Array, Bool, Float, Int
    except ImportError:
        from jax import Array

        class _Unchecked:
            """Stands for jaxtyping's dtypes where it is not installed: `Float[Array, "N D"]`."""

            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Array", "Bool", "Float", "Int"]
