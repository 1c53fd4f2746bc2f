"""The texts of verification: llmc's own words (Apache-2.0), in several languages, scripts and kinds of code.

A bundle's accuracy is measured over TEXTS. Each part has slightly more than a hundred tokens for a vocabulary of fifty
thousand; probes.py takes equally many of each. `long_text` joins the passages in changing orders, each under its
own heading. No part of it repeats, because a cache that is off by one period would look right with a repeating text.
Names, numbers and facts are made up, which rules out that a model has memorised them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

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


PASSAGES = (
    "A river port grows where goods must change their carrier. Barges bring grain, timber and stone as far as "
    "the water is deep enough; from there on carts take over, and where carts wait there are stables, inns and "
    "smiths. In 1342 the council of one such port counted 41 cranes, 17 of them driven by men walking inside a "
    "wheel. A crane's fee was 2 pence a barrel, 5 for a millstone, and nothing for salt, since the salt belonged "
    "to the bishop.",
    'The account books list every load: "item, 12 barrels of herring, 3 of them spoiled"; "item, 1 bell, '
    'cracked". When the river moved its bed eastward after the flood, the cranes stood dry, and within a '
    "generation the inns had become farms. What remains is a street named after the wheel, and a habit of speech.",
    "def toll(barrels: int, stones: int, salt: int = 0) -> int:\n"
    '    """What a cart pays at the gate, in pence; salt is free."""\n'
    "    if min(barrels, stones, salt) < 0:\n"
    '        raise ValueError(f"a load cannot be negative: {barrels}, {stones}, {salt}")\n'
    "    return 2 * barrels + 5 * stones\n",
    "Der Müller am oberen Wehr hatte zwei Söhne, von denen der jüngere das Rechnen liebte. Jeden Abend schrieb "
    "er auf, wie hoch das Wasser stand, und nach neun Jahren wusste er, an welchem Tag im März das Eis brechen "
    "würde. Niemand glaubte ihm, bis er sich einmal um einen einzigen Tag geirrt hatte.",
    "Le facteur du village passait à sept heures, sauf quand il neigeait. Il connaissait chaque chien par son "
    "nom et chaque porte par le bruit qu'elle faisait. Le jour de sa retraite, quarante-deux personnes lui "
    "avaient écrit une lettre, et c'est lui qui a dû les distribuer.",
    "#include <stddef.h>\n\n/* The largest of n numbers; n is at least 1. */\nfloat largest(const float *x, "
    "size_t n) {\n"
    "    float best = x[0];\n    for (size_t i = 1; i < n; i++) {\n        if (x[i] > best) best = x[i];\n    }\n"
    "    return best;\n}\n",
    "La biblioteca abrió en una antigua fábrica de jabón, y los libros todavía huelen un poco a lavanda. En la "
    "planta baja hay mapas de ríos que ya no existen; en el segundo piso, una niña lee en voz alta para su "
    "abuelo, que perdió sus gafas en 1998 y nunca compró otras.",
    "Смотритель маяка вёл два журнала. В первый он записывал погоду, во второй сны. Когда через двадцать лет он "
    "сравнил страницы, оказалось, что перед бурей ему всегда снилась лестница, а перед ясным днём пустая комната "
    "с тремя окнами.",
    "老茶馆在桥的东边,门口挂着一盏旧灯。老板每天早上五点烧水,先给自己泡一壶,再给猫倒一碟。客人说茶的味道三十年没有变,只有价钱从两分涨到了十二块。下雨的时候,他会把门开大一点。",
    "| station | opened | platforms | trains a day |\n|---|---:|---:|---:|\n| Norrvik | 1887 | 3 | 64 |\n| "
    "Hallow Point | "
    "1921 | 1 | 9 |\n| Ostmark Cross | 1904 | 6 | 212 |\n\nOstmark Cross has more trains than the other two together: "
    "212 against 64 + 9 = 73.\n",
    "山のふもとの駅では、終電のあとに狐が待合室で眠る。駅長は見て見ぬふりをして、ストーブの火を少しだけ残しておく。"
    "春になると狐は来なくなり、かわりにベンチの下に小さな足あとが三つ残っていた。",
    "O relojoeiro da praça só conserta relógios que atrasam. Os que adiantam, diz ele, têm as suas razões. Na "
    "parede há "
    "vinte e três horas diferentes, e ao meio-dia verdadeiro a loja inteira fica em silêncio por um instante.",
    '{"order": 7714, "customer": {"name": "I. Okafor", "city": "Leuven"}, "lines": [{"item": "valve", "count": 2, '
    '"price": 8.75}, {"item": "tape", "count": 10, "price": 1.2}], "total": 29.5, "paid": false, "note": null}\n',
    "كان في المدينة القديمة خبّاز يبيع سبعة أنواع من الخبز، لكل يوم نوع. في يوم الجمعة كان يخبز رغيفا كبيرا لا يبيعه، "
    "بل يتركه على النافذة لمن يمر جائعا.",
    "Il ponte vecchio ha undici archi, ma gli abitanti ne contano dodici: l'ultimo lo disegnò un bambino con il "
    "gesso sul muro del mulino, e da allora nessuno ha avuto il coraggio di cancellarlo. La pioggia lo rispetta.",
    "fn overlap(a: (u32, u32), b: (u32, u32)) -> Option<(u32, u32)> {\n    let (low, high) = (a.0.max(b.0), "
    "a.1.min(b.1));\n"
    "    if low < high { Some((low, high)) } else { None }\n}\n\n#[test]\nfn touching_ranges_do_not_overlap() {\n"
    "    assert_eq!(overlap((0, 4), (4, 9)), None);\n}\n",
    "우체국 뒤의 작은 정원에는 주인을 모르는 감나무가 있다. 가을이 "
    "되면 사람들은 감을 하나씩만 가져가고, 마지막 감은 언제나 까치를 위해 남겨 둔다.",
    "Q: A tank holds 240 litres and loses 3 litres an hour. After how many hours is a quarter of it gone?\nA: A "
    "quarter of "
    "240 is 60, and 60 / 3 = 20. After 20 hours.\nQ: And if it is refilled by 1 litre an hour meanwhile?\nA: "
    "Then it loses 2 "
    "litres an hour, and 60 / 2 = 30. After 30 hours.\n",
    "Στο νησί υπήρχε ένας μόνο δρόμος και δύο αυτοκίνητα. Μια μέρα συγκρούστηκαν στη στροφή πάνω από το λιμάνι, και οι "
    "οδηγοί, που δεν μιλούσαν εδώ και δέκα χρόνια, γέλασαν τόσο πολύ που ξέχασαν γιατί είχαν μαλώσει.",
    "नदी के किनारे एक नाविक रहता था जो केवल शाम को नाव चलाता था। वह कहता था कि सुबह का पानी भूल जाता है, पर शाम "
    "का पानी सब याद रखता है।",
    "SELECT station, COUNT(*) AS trains, AVG(delay_s) AS delay\nFROM departures\nWHERE day BETWEEN '2019-03-01' AND "
    "'2019-03-31' AND NOT cancelled\nGROUP BY station\nHAVING COUNT(*) > 40\nORDER BY delay DESC;\n",
    "Köprünün altındaki balıkçı her gün aynı yere oturur, ama oltasına hiç yem takmaz. Soranlara, balıkların da "
    "dinlenmeye hakkı olduğunu söyler. Akşam eve boş kovayla döner ve karısı kovayı çiçeklerle doldurur.",
    "Pogoda w górach zmieniała się trzy razy dziennie, więc przewodnik nosił trzy kapelusze. Pierwszy był od "
    "słońca, drugi od deszczu, a trzeci zakładał tylko wtedy, gdy nie wiedział, co powiedzieć turystom.",
    "export function median(values) {\n  if (values.length === 0) throw new RangeError('no values');\n  const sorted = "
    "[...values].sort((a, b) => a - b);\n  const half = Math.floor(sorted.length / 2);\n  return sorted.length % 2 ? "
    "sorted[half] : (sorted[half - 1] + sorted[half]) / 2;\n}\n",
)


def long_text(encode: Callable[[str], list[int]], count: int) -> list[int]:
    """The first `count` tokens of the text, however long; `encode` is the tokenizer's."""
    tokens: list[int] = []
    order, chapter = list(range(len(PASSAGES))), 0
    while len(tokens) < count:
        before = len(tokens)
        for at in order:
            tokens += encode(f"{chapter}.{at}\n{PASSAGES[at]}\n\n")
            if len(tokens) >= count:
                break
        if len(tokens) == before:
            break  # the tokenizer gives no tokens for any text
        chapter += 1
        random.Random(chapter).shuffle(order)  # noqa: S311 - no secret, and the same everywhere
    return tokens[:count]
