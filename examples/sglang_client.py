"""Ask a server of examples/sglang_serve.sh, and show how its prefill ran.

    python examples/sglang_client.py ["a prompt"] [--url http://127.0.0.1:30000]

Only the standard library is used.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    arguments = parser.parse_args()
    sampling = {"temperature": 0, "max_new_tokens": 32}
    answer = call(f"{arguments.url}/generate", {"text": arguments.prompt, "sampling_params": sampling})
    print(arguments.prompt + answer["text"])
    reports = call(f"{arguments.url}/get_server_info")["internal_states"][0].get("fullgraph_compile")
    if not reports:
        print("The server runs without the plugin: start it with FULLGRAPH_COMPILE_SGLANG=1.")
        return
    for report in reports:
        replays, fallbacks = sum(report["replays"].values()), sum(report["fallbacks"].values())
        print(f"{report['name']}: {replays} batches replayed, {fallbacks} ran eagerly")
        for reason, count in report["fallbacks"].items():
            print(f"  {count} x {reason} (first: {report['first_fallbacks'][reason]})")


if __name__ == "__main__":
    main()
