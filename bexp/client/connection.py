"""The connection to a service: its requests, its pages, and what is raised if it refuses or fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from bexp.client.address import is_loopback, without_secrets
from bexp.client.errors import ProblemError, ServiceError


class Connection:
    """Sends requests to one service. `timeout` is in seconds, for one request.

    Every method raises `ProblemError` if the service refuses the request (4xx), and `ServiceError` if it cannot be
    reached or fails.
    """

    def __init__(
        self, url: str, token: str | None = None, timeout: float = 30.0, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        address_of_service = url.rstrip("/")
        self.url = without_secrets(address_of_service)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            address = httpx.URL(address_of_service)
            if address.scheme not in {"http", "https"}:
                raise ValueError("it must start with http:// or https://")  # noqa: TRY301 - one message for both
            beyond = not is_loopback(address.host)  # no proxy stands between this machine and itself
            self._http = httpx.Client(
                base_url=address_of_service,
                headers=headers,
                timeout=timeout,
                transport=transport,
                trust_env=beyond,
                # The context reads SSL_CERT_FILE and a file of all authorities. That takes long, and http needs none.
                verify=httpx.create_ssl_context() if address.scheme == "https" else False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ServiceError(f"{self.url!r} is not a URL of a service: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def check_alive(self) -> None:
        """Raise ServiceError with the reason if no service of this kind answers at the URL."""
        try:
            alive = self._http.get("/healthz", timeout=2.0).json() == {"status": "alive"}
        except httpx.HTTPError as error:
            raise ServiceError(self.reason(error)) from error
        except ValueError:
            alive = False
        if not alive:
            raise ServiceError(f"what answers at {self.url} is not a bexp service")

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return the response."""
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServiceError(self.reason(error)) from error
        _raise_for(response)
        return response

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Send a request and return the JSON of the response."""
        response = self.send(method, path, **options)
        try:
            return response.json()
        except ValueError as error:
            raise ServiceError(f"{self.url}{path} did not answer with JSON: is this a bexp service?") from error

    def page(self, path: str, **options: Any) -> dict[str, Any]:
        """Return a page of a list, which has `items`."""
        document = self.request("GET", path, **options)
        if not isinstance(document, dict) or not isinstance(document.get("items"), list):
            raise ServiceError(f"{self.url} did not answer with a list: is this a bexp service?")
        return document

    def pages(self, path: str, **params: Any) -> Iterator[Any]:
        """Yield the items of all pages of a list."""
        while True:
            page = self.page(path, params=params)
            yield from page["items"]
            cursor = page.get("next_cursor")
            if cursor is None or cursor == params.get("cursor"):
                return
            params["cursor"] = cursor

    @contextmanager
    def stream(self, path: str, headers: dict[str, str], silence_seconds: float) -> Iterator[httpx.Response]:
        """Open a stream that ends if nothing comes for `silence_seconds`.

        Raises httpx.HTTPError if the connection breaks, and nothing for a status that is an error.
        """
        timeout = httpx.Timeout(self._http.timeout.connect, read=silence_seconds)
        with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            yield response

    def reason(self, error: httpx.HTTPError) -> str:
        """Return what is wrong with a connection."""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return f"{self.url}: {error}; if an authority of your own has signed it, name its file in SSL_CERT_FILE"
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return f"no service answers at {self.url}"
        if isinstance(error, httpx.TimeoutException):
            return f"the service at {self.url} did not answer in time"
        return f"the connection to {self.url} broke: {error or type(error).__name__}"


def raise_for_stream(response: httpx.Response) -> None:
    """Raise what the status of an opened stream means."""
    response.read()
    _raise_for(response)


def _raise_for(response: httpx.Response) -> None:
    if response.status_code < httpx.codes.BAD_REQUEST:
        return
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {"title": response.reason_phrase or f"HTTP {response.status_code}"}
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        cause = problem.get("detail") or problem.get("title")
        raise ServiceError(f"the service failed with {response.status_code}: {cause}")
    raise ProblemError(response.status_code, problem)
