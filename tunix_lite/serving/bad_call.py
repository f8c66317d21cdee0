"""The error of a request that cannot be answered."""

# Codes of errors whose status is not 400.
_STATUS_OF_CODE = {
    "invalid_api_key": 401,
    "model_not_found": 404,
    "not_found": 404,
    "episode_is_over": 410,
    "session_is_over": 410,
    "rate_limit_exceeded": 429,
}


class BadCall(ValueError):
    """A request that cannot be answered. `field`: the wrong one; `code`: as the API names it."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None):
        super().__init__(message)
        self.field = field
        self.code = code

    @property
    def status(self) -> int:
        """The status of the answer."""
        return _STATUS_OF_CODE.get(self.code, 400)
