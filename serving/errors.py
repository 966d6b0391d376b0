"""What clients are told when something is wrong."""

from starlette.responses import JSONResponse

_LONGEST = 300

_TYPES = {
  400: "invalid_request_error",
  401: "authentication_error",
  404: "not_found_error",
  413: "invalid_request_error",
  429: "rate_limit_error",
  500: "internal_error",
  503: "service_unavailable_error",
}


class RequestError(Exception):
  """A request that is answered by an error.

  Attributes:
    status: HTTP status.
    param: Name of the parameter that is wrong, if one is.
    headers: To send along.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    headers: dict[str, str] | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.param = param
    self.headers = headers


def body(status: int, message: str, param: str | None = None) -> dict:
  """The JSON of an error; its message is cut to a bounded length."""
  message = " ".join(message.split())
  if len(message) > _LONGEST:
    message = message[: _LONGEST - 1] + "…"
  return {
    "error": {
      "message": message,
      "type": _TYPES.get(status, "invalid_request_error"),
      "param": param,
      "code": status,
    }
  }


def response(error: RequestError) -> JSONResponse:
  """The answer that an error gives."""
  return JSONResponse(
    body(error.status, str(error), error.param),
    status_code=error.status,
    headers=error.headers,
  )
