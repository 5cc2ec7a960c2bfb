"""Errors of the runtime. Each message is one sentence: what, name, problem, got, want."""


class ArtifactError(Exception):
    """An artifact cannot be loaded: damaged, of another format, or for another machine."""


class RequestError(Exception):
    """A request is refused, or ended with an error; other requests are not affected."""
