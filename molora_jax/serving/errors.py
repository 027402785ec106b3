"""What a client is told when a request cannot be answered: one form, one status, no trace."""

from typing import Any

from molora_jax.files import one_line

_TYPES = {
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An answer that is no result.

    status   of HTTP
    message  what was wrong, what was expected, what to do
    param    the field of the body that it is about
    code     a word that programs can compare
    retry_after  seconds after which another try makes sense
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message = status, one_line(message, limit=1000)
        self.param, self.code, self.retry_after = param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status in (408, 413):  # the rest of the body is not waited for
            found["Connection"] = "close"
        return found


def refused(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong, and will be tomorrow."""
    return ApiError(400, message, param=param, code=code)
