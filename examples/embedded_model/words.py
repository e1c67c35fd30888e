"""Words that synthetic conversations are made of."""

from __future__ import annotations

VERBS = ("get", "find", "show", "read", "list", "check", "open", "fetch", "count", "start", "stop", "delete", "update")
NOUNS = (
    *("user", "order", "ticket", "invoice", "book", "server", "job", "device", "account", "branch", "file", "room"),
    *("train", "flight", "parcel", "page", "song", "recipe", "task", "build", "table", "sensor", "backup", "lamp"),
)
KEYS = ("id", "name", "key", "number", "code", "label", "title")
STATES = ("ready", "open", "closed", "late", "missing", "new", "busy", "broken", "on its way", "in use", "up to date")
SKIES = ("clear", "cloudy", "rainy", "foggy", "windy", "sunny", "stormy", "snowy")
CITIES = tuple(
    "Oslo Paris London Berlin Madrid Rome Lisbon Vienna Prague Warsaw Athens Dublin Helsinki Stockholm Copenhagen Bern "
    "Zurich Geneva Milan Naples Turin Venice Munich Hamburg Cologne Frankfurt Leipzig Dresden Lyon Nice Lille Nantes "
    "Porto Seville Valencia Bilbao Granada Krakow Gdansk Budapest Sofia Bucharest Belgrade Zagreb Split Riga Vilnius "
    "Tallinn Bergen Malmo Aarhus Cairo Tunis Lagos Accra Nairobi Dakar Tokyo Osaka Kyoto Seoul Busan Taipei Manila "
    "Hanoi Bangkok Jakarta Delhi Mumbai Chennai Lahore Karachi Dhaka Tehran Baghdad Amman Beirut Ankara Izmir Boston "
    "Chicago Denver Dallas Houston Seattle Portland Austin Miami Atlanta Toronto Montreal Ottawa Calgary Lima Quito "
    "Bogota Santiago Caracas Havana Sydney Perth Brisbane Darwin Auckland Wellington".split()
)
PEOPLE = tuple(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Karen Leo Maria Nils Olga Paul Quinn Rosa Simon Tina Uwe "
    "Vera Walter Xenia Yara Zoe Amir Bao Chen Dara Elif Farid Goran Hana Ines Jamal Kofi Lena Marco Nadia Omar Petra "
    "Ravi Sara Tariq Ulla Viktor Wanda Yusuf Zara".split()
)
WORDS = tuple(
    "app main test data log report build index notes server client model table query cache login mail image video "
    "config parser reader writer token window buffer socket thread worker master backup archive release update green "
    "blue red silver north south river stone cloud apple bread coffee chair lamp bridge garden winter summer tiger "
    "falcon rocket planet circle square copper velvet orange lemon pepper button engine pencil paper".split()
)
ENDINGS = ("py", "txt", "md", "json", "log", "csv", "html", "cfg")
