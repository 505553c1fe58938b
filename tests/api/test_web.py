from __future__ import annotations

import base64
import json
import math
import re

import pytest
from fastapi.testclient import TestClient

from bexp.api.web.assets import CONTENT_SECURITY_POLICY, read_assets
from bexp.api.web.report import render_report
from bexp.explorer.records.recommendation import Recommendation


def test_a_report_holds_each_module_that_it_imports_and_names_none_by_a_folder() -> None:
    page = render_report({"model": "<b>"}, [], [{"message": "</script>"}])
    assert "<title>&lt;b&gt;: report of bexp</title>" in page
    assert page.count("</script>") == page.count("<script"), "nothing in the data ends the element"
    with pytest.raises(ValueError, match="not JSON compliant"):
        render_report({"model": "m", "performance": math.nan}, [], [])
    found = re.search(r'\{"imports": .*?\}\}', page)
    assert found is not None
    modules = json.loads(found[0])["imports"]
    texts = [base64.b64decode(url.removeprefix("data:text/javascript;base64,")).decode() for url in modules.values()]
    imported = {name for text in texts for name in re.findall(r'from "(.+?)"', text)}
    assert imported <= set(modules)
    assert set(modules) - imported == {"report.js"}, "nothing else is held, as of the pages of a service"


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/docs", "text/html; charset=utf-8"),
        ("/web/app.js", "text/javascript; charset=utf-8"),
        ("/llms.txt", "text/plain; charset=utf-8"),
        ("/web/style.css", "text/css; charset=utf-8"),
    ],
)
def test_files_of_the_page_have_their_type_and_a_strict_policy(client: TestClient, path: str, media_type: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.headers["Content-Type"] == media_type
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    plain = client.get(path, headers={"Accept-Encoding": "identity"})
    assert (response.headers.get("Content-Encoding"), plain.headers.get("Content-Encoding")) == ("gzip", None)
    assert int(response.headers["Content-Length"]) < len(plain.content) == len(response.content)
    assert response.headers["ETag"] != plain.headers["ETag"]
    for sent in (response, plain):
        known = client.get(path, headers={"If-None-Match": sent.headers["ETag"]})
        assert (known.status_code, known.content, known.headers["Vary"]) == (304, b"", "Accept-Encoding")
    assert client.head(path).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "assets.py", "report.html", "..%2fapp.py"])
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/web/{name}").status_code == 404


def test_pages_refer_to_nothing_outside_of_their_folder() -> None:
    for name, asset in read_assets().items():
        text = asset.body.decode().replace("http://www.w3.org/", "").replace("'http:", "'")
        assert "http:" not in text and "https:" not in text, name
        assert 'src="/' not in text and 'href="/' not in text, name


def test_what_agents_are_told_is_there(client: TestClient) -> None:
    text = client.get("/llms.txt").text
    for link in re.findall(r"\]\((/[^)]*)\)", text):
        assert client.get(link).status_code == 200, link
    paths = client.get("/openapi.json").json()["paths"]
    for method, path in re.findall(r"`(GET|POST) (/v1/[^`?]+)", text):
        assert method.lower() in paths[path.replace("ID", "{exploration_id}")], path
    fields = json.dumps(Recommendation.model_json_schema())
    assert all(f'"{name}"' in fields for name in ("confidence", "run_noise", "expected_regret", "alternatives"))
