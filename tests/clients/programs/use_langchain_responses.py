"""langchain-openai, over /v1/responses."""

from __future__ import annotations

import use_langchain
from worker import run

use_langchain.RESPONSES = True
run(use_langchain.CASES)
