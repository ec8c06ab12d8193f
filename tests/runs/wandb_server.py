"""A W&B server as small as its client allows: runs, their history as lines of a file stream, and how to go on with one.

It answers GraphQL (UpsertBucket, RunResumeStatus; anything else with nulls) and the file stream, whose chunks replace
lines from their offset on, as W&B's own does.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VIEWER = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}, "email": ""}


@dataclass
class ServedRun:
    """`lines` is the history as it stands, `received` every row that ever came, in order."""

    config: dict[str, Any] = field(default_factory=dict)
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    name: str | None = None
    project: str | None = None
    lines: list[str] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line]


@dataclass
class Server:
    url: str = ""
    runs: dict[str, ServedRun] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refuse: bool = False  # answer the file stream with 403

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "UpsertBucket" in query:
            return {"upsertBucket": self.upsert(variables)}
        if "RunResumeStatus" in query:
            return {"model": self.status(variables)}
        if "CreateRunFiles" in query:
            return {"createRunFiles": self.no_files(variables)}
        if "viewer" in query:
            return {"viewer": VIEWER, "serverInfo": None}
        return {}

    def upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        new = name not in self.runs
        run = self.runs.setdefault(name, ServedRun())
        if variables.get("config"):
            run.config = json.loads(variables["config"])
        run.tags = variables.get("tags") or run.tags
        run.group = variables.get("groupName") or run.group
        run.name = variables.get("displayName") or run.name
        run.project = variables.get("project") or run.project
        project = {"id": "p", "name": run.project, "entity": {"id": "e", "name": "me"}}
        bucket = {"id": f"id-{name}", "name": name, "displayName": run.name, "config": json.dumps(run.config)}
        return {
            "bucket": bucket | {"project": project, "sweepName": None, "historyLineCount": len(run.lines)},
            "inserted": new,
        }

    def status(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables["name"])
        model = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}, "bucket": None}
        if run is None:
            return model
        bucket = {
            "id": f"id-{variables['name']}",
            "name": variables["name"],
            "displayName": run.name,
            "summaryMetrics": json.dumps(run.summary),
            "logLineCount": 0,
            "historyLineCount": len(run.lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps(run.lines[-1:]),
            "eventsTail": "[]",
            "config": json.dumps(run.config),
            "tags": run.tags,
            "notes": None,
            "wandbConfig": json.dumps({"t": {}}),
        }
        return model | {"bucket": bucket}

    def no_files(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Files go nowhere: their uploads are answered and forgotten."""
        files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
        return {"runID": variables["run"], "uploadHeaders": [], "files": files}

    def stream(self, name: str, body: dict[str, Any]) -> None:
        run = self.runs[name]
        files = body.get("files") or {}
        if (chunk := files.get("wandb-history.jsonl")) is not None:
            lines, offset = chunk["content"], chunk["offset"]
            run.lines += [""] * (offset - len(run.lines))
            run.lines[offset : offset + len(lines)] = lines
            run.received += [json.loads(line) for line in lines]
        if (chunk := files.get("wandb-summary.json")) is not None:
            run.summary |= json.loads(chunk["content"][-1])
        if body.get("complete"):
            run.exit_codes.append(body.get("exitcode"))


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            raw = zlib.decompress(raw, 31) if self.headers.get("Content-Encoding") == "gzip" else raw
            is_json = "/upload" not in self.path
            body = json.loads(raw or b"{}") if is_json else {}
            with lock:
                server.requests.append(f"{self.path} {body.get('query', '')[:60]}")
                if self.path.endswith("/graphql"):
                    return self.answer(200, {"data": server.graphql(body["query"], body.get("variables") or {})})
                if not self.path.endswith("/file_stream"):
                    return self.answer(200, {})
                if server.refuse:
                    return self.answer(403, {"error": "refused"})
                server.stream(self.path.split("/")[-2], body)
            return self.answer(200, {})

        def do_GET(self) -> None:
            self.answer(200, {})

        do_PUT = do_POST

        def answer(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """The client drops connections when it is done: nothing to report."""


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()
    http = _Quiet(("127.0.0.1", 0), _handler(server))
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
