"""The text that a bundle's accuracy is measured over: llmc's own words (Apache-2.0), in five kinds.

Each part has slightly more than a hundred tokens for a vocabulary of fifty thousand; windows.py takes equally many of
each. Names, numbers and facts are made up, which rules out that a model has memorised the text.
"""

from __future__ import annotations

TEXTS = {
    "prose": (
        "The ferry to Hallow Point left before the fog had lifted, and for an hour nobody on board could say whether "
        "it was moving. Marta kept the mailbag between her feet. She had carried it across for eleven years, and in "
        "all that time only one letter had been addressed to the island itself, with no name and no street. The "
        "council had argued for a week about who should open it. In the end they pinned it to the door of the chapel, "
        "where the rain took it apart, and everybody remembered a different sentence. When the engine stopped, she "
        "could hear the bell, and behind it somebody laughing."
    ),
    "code": (
        "from collections import deque\n\n\n"
        "def shortest_path(graph, start, goal):\n"
        '    """Nodes on a shortest path from start to goal, or None."""\n'
        "    previous = {start: None}\n"
        "    queue = deque([start])\n"
        "    while queue:\n"
        "        node = queue.popleft()\n"
        "        if node == goal:\n"
        "            path = []\n"
        "            while node is not None:\n"
        "                path.append(node)\n"
        "                node = previous[node]\n"
        "            return path[::-1]\n"
        "        for neighbour in graph[node]:\n"
        "            if neighbour not in previous:\n"
        "                previous[neighbour] = node\n"
        "                queue.append(neighbour)\n"
        "    return None\n"
    ),
    "chat": (
        "User: I bake 3 trays of 24 rolls every morning and sell each roll for 0.80. How much do I earn in 6 days?\n"
        "Assistant: You bake 3 × 24 = 72 rolls a day. If all of them are sold, that is 72 × 0.80 = 57.60 a day, and "
        "in 6 days 345.60.\n"
        "User: And if 5 rolls a day stay unsold?\n"
        "Assistant: Then you lose 5 × 0.80 = 4.00 a day, which leaves 53.60 a day, or 321.60 in 6 days."
    ),
    "languages": (
        "Am Abend zählten die Fischer ihre Netze. La bibliothèque ferme à dix-huit heures, sauf le jeudi. El tren "
        "llegó tarde porque había nieve en el paso. Поезд прибывает утром. 图书馆星期一不开门。"
        "今日は店が休みです。القطار متأخر اليوم. 오늘은 비가 온다. Il vecchio ponte era più stretto della strada."
    ),
    "data": (
        '{"station": "Norrvik", "height_m": 412, "readings": [{"time": "06:00", "temp_c": -3.5}]}\n\n'
        "| item | unit price | quantity |\n"
        "|---|---|---|\n"
        "| valve | 8.75 | 2 |\n"
        "| tape | 1.20 | 10 |\n\n"
        "SELECT item, SUM(total) FROM orders WHERE year = 2019 GROUP BY item ORDER BY 2 DESC;\n"
    ),
}
"""Texts by part."""
