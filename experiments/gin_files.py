"""What gin says of an experiment's Config: configs/*.gin, --gin_file and --gin_bindings."""

import pathlib
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

from experiments import registry
from experiments.registry import Misuse, one_line
from experiments.settings import nearest_fields

# In a checkout configs/ lies beside this package; an installed one has it inside.
_HERE = pathlib.Path(__file__).resolve().parent
CONFIGS = (_HERE if (_HERE / "configs").is_dir() else _HERE.parent) / "configs"
OWN_PACKAGES = ("__gin__", "experiments", "molora_jax", "pallas_kernels")
MAX_INCLUDES = 32


def own_values(
    name: str,
    module: Any,
    scale: str,
    *,
    configs: pathlib.Path = CONFIGS,
    lenient: bool = False,
) -> dict[str, Any]:
    """The experiment's own config at a scale: its defaults (scale cpu), then configs/NAME.gin, then
    configs/SCALE.gin.

    Args:
      lenient: a scale that it does not have changes nothing.

    Raises:
      Misuse: it has no such scale.
    """
    own, of_scale = configs / f"{name}.gin", configs / f"{scale}.gin"
    values = registry.defaults(module.Config)
    values |= bindings(module, files=[own] if own.exists() else [])
    if scale != "cpu":
        found = bindings(module, files=[of_scale], shared=True) if of_scale.exists() else {}
        if not (found or lenient):
            has_none = f"{of_scale.name} binds nothing of it"
            raise Misuse(f"experiment {name!r} has no --scale={scale}: {has_none}")
        values |= found
    return values


def bindings(
    module: Any, *, files: Sequence[Any] = (), texts: Sequence[str] = (), shared: bool = False
) -> dict[str, Any]:
    """What gin files and binding strings say about `module.Config`: {field: value}.

    gin accepts a binding of anything that can be imported, and macros that nobody reads; both
    would do nothing without a word, so they are refused, except that a `shared` file may bind other
    experiments. It would also import, and so run, any module that a file names: only the project's
    own are let through.

    Raises:
      Misuse: what is unknown, unused, or not to be parsed, with the nearest known names.
    """
    import gin

    package, _, short = module.__name__.rpartition(".")
    imports = f"from {package} import {short}" if package else f"import {short}"
    preamble = f"from __gin__ import dynamic_registration\n{imports}\nexperiment = @{short}.Config"
    own = {module.__name__.partition(".")[0], *OWN_PACKAGES}
    gin.clear_config()
    try:
        sources = [text for file in files for text in _with_includes(file, own)]
        for text in texts:
            sources += _checked(text, "--gin_bindings", own)
        for file in files:
            gin.parse_config_file(str(file))
        gin.parse_config("\n".join([preamble, *texts]))
        values = gin.get_bindings(module.Config)
        written = gin.config_str(max_line_length=10**4)  # gin pads its comments to it
    except Misuse:
        raise
    except Exception as error:
        if shared:  # the project's own file: a mistake in the code, not the caller's
            raise
        raise Misuse(_explain(error, module, short)) from None
    finally:
        gin.clear_config()
    if not shared:
        for binding in _without_effect(written, [written, *sources], short):
            near = nearest_fields(binding, module, prefix=f"{short}.Config.")
            shown = one_line(binding)
            raise Misuse(f"binding {shown!r} has no effect on this experiment{near}")
    return values


def _with_includes(file: Any, own: Set[str]) -> list[str]:
    """The text of a gin file and of all that it includes, in which only `own` is imported."""
    try:
        found = pathlib.Path(file).is_file()
        text = pathlib.Path(file).read_text(encoding="utf-8") if found else ""
    except (OSError, ValueError) as error:
        raise Misuse(f"--gin_file={one_line(str(file))}: {one_line(str(error))}") from None
    if not found:
        known = sorted(path.name for path in CONFIGS.glob("*.gin"))
        near = registry.hint(pathlib.Path(file).name, known)
        raise Misuse(f"--gin_file={one_line(str(file))}: there is no such file{near}")
    return _checked(text, f"--gin_file={one_line(str(file))}", own)


def _checked(text: str, where: str, own: Set[str], *, depth: int = 0) -> list[str]:
    """`text` and all that it includes, read as gin reads them but without importing anything."""
    from gin import config_parser

    class Nothing(config_parser.ParserDelegate):
        """Takes references and macros without looking for what they name."""

        def configurable_reference(self, scoped_configurable_name, evaluate):
            return scoped_configurable_name

        def macro(self, scoped_name):
            return scoped_name

    found = [text]
    for statement in config_parser.ConfigParser(text, Nothing()):
        if isinstance(statement, config_parser.ImportStatement):
            package = statement.module.partition(".")[0]
            if package not in own:
                raise Misuse(
                    f"{where}: import of {one_line(statement.module)!r}: a gin file may import "
                    f"only from {', '.join(sorted(own))}, since an import runs code"
                )
        elif isinstance(statement, config_parser.IncludeStatement):
            if depth == MAX_INCLUDES:
                raise Misuse(f"{where}: more than {MAX_INCLUDES} files include each other")
            inner = pathlib.Path(statement.filename)
            if inner.suffix != ".gin" or not inner.is_file():
                name = one_line(statement.filename)
                raise Misuse(f"{where}: include {name!r}: there is no such .gin file")
            found += _checked(inner.read_text(encoding="utf-8"), where, own, depth=depth + 1)
    return found


def _without_effect(written: str, sources: Sequence[str], short: str) -> Iterator[str]:
    """Bindings, among those that gin wrote out, that the Config of module `short` never sees."""
    for binding in re.findall(r"^([\w./]*) = ", written, flags=re.MULTILINE):
        target, _, _ = binding.rpartition(".")
        if target:
            if not re.search(rf"(^|\.){re.escape(short)}\.Config$", target):
                yield binding
        elif not binding:  # gin's own macro without a scope, which is a macro without a name
            yield "gin.macro.value"
        # A macro counts as read if any source reads it: a later binding may have replaced that one.
        elif binding != "experiment" and not re.search(rf"%{binding}\b", "\n".join(sources)):
            yield binding


def _explain(error: Exception, module: Any, short: str) -> str:
    """gin's message, and the nearest names to the binding that it quotes."""
    text = str(error) or type(error).__name__
    # Python 3.12's tokenizer counts parentheses itself.
    if isinstance(error, RecursionError | MemoryError) or "too many nested" in text:
        return "a binding is nested too deep, or refers to itself"
    if undefined := re.search(r"In call to configurable 'macro' .* in scope '(.*)'", text):
        return f"macro %{one_line(undefined[1])} is read and not defined"
    if "Failed to parse token" in text:
        text += ". A string needs quotes of its own here, and none in field=text"
    quoted = re.findall(r"^\s*([\w./]+)\s*=", text, flags=re.MULTILINE)
    near = nearest_fields(quoted[-1], module, prefix=f"{short}.Config.") if quoted else ""
    return one_line(text) + near
