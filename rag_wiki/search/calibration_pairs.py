"""Questions with a passage that answers each: what an embedding model is calibrated with.

Six in each of four languages, short and long, asked in different ways. Subjects lie far apart, so a question and
another one's passage have nothing to do with each other.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PAIRS", "Pair"]


class Pair(NamedTuple):
    """A question and a passage that answers it."""

    language: str
    """ISO 639-1."""
    question: str
    passage: str


PAIRS: tuple[Pair, ...] = (
    Pair(
        "en",
        "parking permit renewal fee residents",
        (
            "Households pay 48 euros a year to keep the right to leave a car on the street, and the request must "
            "arrive two weeks before expiry."
        ),
    ),
    Pair(
        "en",
        "Why are there two high waters most days?",
        (
            "The Moon raises one bulge of ocean on the near side of the Earth and another on the far side, and a "
            "coast turns through both in about 25 hours."
        ),
    ),
    Pair(
        "en",
        "What does a sender do to its speed after packets get lost?",
        (
            "The congestion window grows by about one segment per round trip while acknowledgements keep arriving. "
            "Three duplicate acknowledgements are taken as a sign that a router queue overflowed, so the window is "
            "halved and the missing segment is sent again at once. If the retransmission timer expires instead, the "
            "window drops to one segment and slow start begins anew, doubling every round trip up to the threshold."
        ),
    ),
    Pair(
        "en",
        "How is the first movement of a classical symphony usually laid out?",
        (
            "An exposition presents two contrasting groups of themes, the first in the home key and the second in the "
            "dominant or, for minor works, the relative major. The development then breaks this material up and "
            "wanders through distant keys. In the recapitulation both groups return in the tonic, so the tension is "
            "resolved, and a coda often rounds the piece off. A slow introduction may come before it all."
        ),
    ),
    Pair(
        "en",
        "Can I carry unused holiday into next year?",
        (
            "Employees accrue 28 days of paid leave over the calendar year. Up to five days that have not been taken "
            "by 31 December move automatically to the following year, where they must be used before the end of "
            "March; anything left after that date lapses without payment. More than five days can be transferred only "
            "if illness, parental leave or an urgent project made it impossible to take time off, and the head of "
            "department has to confirm this in writing. People who joined after September may move their whole "
            "balance once. Days bought through the flexible benefits scheme never roll over and are refunded with the "
            "January salary. The balance shown in the personnel portal is updated on the first working day of each "
            "month."
        ),
    ),
    Pair(
        "en",
        "What did medieval English peasants owe their lord besides rent?",
        (
            "Holding a villein tenement in the thirteenth century meant far more than handing over a few pence each "
            "quarter. Two or three days of every week went to ploughing, carting or weeding the demesne, with extra "
            "boon work at harvest, when the manor at least supplied ale and bread. Grain had to be ground at the "
            "lord's mill, which kept a sixteenth or so as multure. A daughter's marriage cost merchet, a father's "
            "death cost the best beast as heriot, and the heir paid an entry fine before taking over the strips. From "
            "time to time the whole village was charged tallage, whose amount was fixed at will. Many of these "
            "burdens were turned into money payments after the plague made labour scarce."
        ),
    ),
    Pair(
        "de",
        "Wie oft muss ich den Wasserkocher von Kalk befreien?",
        (
            "Bei hartem Wasser genügt es, das Gerät alle vier Wochen mit verdünnter Essigessenz aufzukochen, eine "
            "halbe Stunde stehen zu lassen und anschließend gut auszuspülen."
        ),
    ),
    Pair(
        "de",
        "letzten Commit rückgängig machen, Änderungen behalten",
        (
            "Der Befehl git reset --soft HEAD~1 versetzt den Zweig um einen Schritt zurück, lässt Arbeitsverzeichnis "
            "und Index unberührt und erlaubt danach ein erneutes Einchecken."
        ),
    ),
    Pair(
        "de",
        "Wie lange muss ich noch Miete zahlen, wenn ich ausziehen will?",
        (
            "Ein unbefristetes Wohnverhältnis endet für die Mieterseite immer mit einer Frist von drei Monaten, ganz "
            "gleich, wie lange man dort gelebt hat. Geht das Schreiben bis zum dritten Werktag eines Monats zu, zählt "
            "dieser Monat noch mit. Es muss eigenhändig unterschrieben sein; eine E-Mail reicht nicht. Früher kommt "
            "man meist nur heraus, wenn der Eigentümer einem Aufhebungsvertrag oder einer Nachfolge zustimmt."
        ),
    ),
    Pair(
        "de",
        "Wozu schlossen sich im Mittelalter norddeutsche Kaufleute zusammen?",
        (
            "Fernhändler aus Lübeck, Hamburg und anderen Städten reisten ab dem 12. Jahrhundert gemeinsam, weil "
            "Seeräuber und fremde Zölle einzelne Schiffe bedrohten. Aus diesen Fahrtgemeinschaften wurde ein "
            "Städtebund, die Hanse, die in Brügge, London, Bergen und Nowgorod eigene Kontore mit Sonderrechten "
            "unterhielt. Gehandelt wurden Heringe, Salz, Pelze, Wachs und Tuch. Mit Handelssperren ließen sich sogar "
            "Könige zum Nachgeben zwingen; der letzte Hansetag fand 1669 statt."
        ),
    ),
    Pair(
        "de",
        "Bekomme ich das Geld für eine dienstliche Bahnfahrt zurück?",
        (
            "Reisen zu Kunden werden vollständig erstattet, sofern die Führungskraft sie vor Antritt im Reiseportal "
            "freigegeben hat. Gebucht wird grundsätzlich die zweite Klasse; ab einer Fahrzeit von vier Stunden darf "
            "die erste Klasse gewählt werden. Wer eine private Ermäßigungskarte einsetzt, bekommt deren Preis "
            "ersetzt, sobald die nachgewiesene Ersparnis höher ist. Die Belege sind spätestens dreißig Tage nach der "
            "Rückkehr als PDF hochzuladen, Papierquittungen müssen danach nicht aufbewahrt werden. Für "
            "Abwesenheiten von mehr als acht Stunden kommt eine Verpflegungspauschale von 14 Euro hinzu, bei "
            "Übernachtungen gelten die Sätze der Anlage 2. Die Auszahlung erfolgt mit dem nächsten Gehaltslauf. "
            "Taxikosten übernimmt die Firma nur, wenn nach 22 Uhr kein öffentliches Verkehrsmittel mehr fährt oder "
            "schweres Gepäck zu befördern ist."
        ),
    ),
    Pair(
        "de",
        "Weshalb erkrankt man an manchen Infektionen nur einmal im Leben?",
        (
            "Dringt ein Erreger zum ersten Mal ein, dauert es ein bis zwei Wochen, bis passende B- und T-Zellen in "
            "ausreichender Zahl vorhanden sind; so lange fühlt man sich schlecht. Nach dem Abklingen sterben die "
            "meisten dieser Zellen ab, ein kleiner Teil bleibt jedoch als Gedächtniszellen über Jahre oder "
            "Jahrzehnte im Knochenmark und in den Lymphknoten. Taucht derselbe Erreger wieder auf, vermehren sie sich "
            "binnen weniger Tage und schütten große Mengen gut bindender Antikörper aus, sodass gar keine "
            "Beschwerden entstehen. Bei Masern hält dieser Schutz in der Regel dauerhaft. Grippeviren dagegen "
            "verändern ihre Oberfläche ständig, weshalb das Gedächtnis sie nach einiger Zeit nicht mehr erkennt. "
            "Impfungen nutzen den gleichen Vorgang, ohne dass man die Krankheit durchmachen muss."
        ),
    ),
    Pair(
        "es",
        "¿En qué época conviene podar los rosales?",
        (
            "A finales del invierno, cuando ya no se esperan heladas fuertes y las yemas empiezan a hincharse, se "
            "cortan los tallos a tres o cuatro brotes de la base."
        ),
    ),
    Pair(
        "es",
        "plazo devolución compra por internet",
        (
            "Quien adquiere un producto a distancia dispone de catorce días naturales desde que lo recibe para "
            "desistir sin dar motivos, aunque suele pagar el envío de vuelta."
        ),
    ),
    Pair(
        "es",
        "¿Por qué salen símbolos raros en lugar de tildes al abrir un archivo?",
        (
            "El documento se guardó en UTF-8, pero el programa lo interpreta como si fuera Latin-1, y cada letra "
            "acentuada se convierte en dos caracteres sin sentido. En lugar de hacer doble clic, conviene usar el "
            "asistente de importación y elegir la codificación correcta en la lista. También ayuda exportar con la "
            "marca BOM al principio, que muchas hojas de cálculo reconocen de forma automática."
        ),
    ),
    Pair(
        "es",
        "¿Qué puede causar cansancio y palidez durante meses?",
        (
            "Cuando el organismo dispone de poco hierro fabrica menos hemoglobina y los tejidos reciben menos "
            "oxígeno. Aparecen entonces fatiga, piel descolorida, uñas frágiles y ahogo al subir escaleras. En "
            "mujeres jóvenes la razón más común son las menstruaciones abundantes; en personas mayores hay que "
            "descartar pérdidas ocultas en el intestino. El médico pide un análisis con ferritina y el tratamiento "
            "dura al menos tres meses."
        ),
    ),
    Pair(
        "es",
        "¿Cuántos días a la semana se puede trabajar desde casa?",
        (
            "El personal de oficina puede prestar servicio a distancia hasta tres jornadas semanales, siempre que "
            "haya superado el periodo de prueba y su puesto figure en la lista del anexo. Los martes son presenciales "
            "para todos los equipos, porque ese día se celebran las reuniones de coordinación. La solicitud se "
            "firma con el responsable directo, dura un año y se renueva sola si ninguna de las partes avisa con "
            "treinta días de antelación. La empresa entrega ordenador, pantalla y silla, y abona además 35 euros "
            "mensuales por los gastos de luz y conexión. Quien viva a más de ochenta kilómetros del centro puede "
            "pedir un cuarto día. La persona debe estar localizable entre las diez y las dos, y conserva el derecho "
            "a desconectar fuera de su horario."
        ),
    ),
    Pair(
        "es",
        "¿Cómo se protegían los barcos que traían plata de América?",
        (
            "Desde mediados del siglo XVI la Corona prohibió que las naves cargadas de metal cruzaran solas el "
            "Atlántico. Dos convoyes salían cada año de Andalucía: uno hacia Veracruz y otro hacia Tierra Firme, "
            "donde se recogían los tesoros del Perú llevados a lomo de mula por el istmo de Panamá. Ambos se "
            "reunían en La Habana y emprendían juntos el regreso antes de la temporada de huracanes. Galeones bien "
            "artillados abrían y cerraban la formación, y los mercaderes costeaban esa escolta con un impuesto "
            "llamado avería. El sistema resultó eficaz: los temporales hundieron muchos más buques que los "
            "corsarios, y solo en contadas ocasiones, como en la bahía de Matanzas en 1628, cayó en manos enemigas "
            "una flota entera."
        ),
    ),
    Pair(
        "zh",
        "铁锅怎样保养才不会生锈？",
        "每次洗净后用小火把水分烘干，再趁热薄薄抹一层食用油，放在通风处，切忌长时间浸泡在水里。",
    ),
    Pair(
        "zh",
        "退租 押金 多久退 扣款",
        "租客交还钥匙并结清水电费后，房东应在七个工作日内把保证金原路返还，正常磨损不得要求赔偿。",
    ),
    Pair(
        "zh",
        "古代普通读书人怎样才能当官？",
        (
            "隋唐以后，朝廷用考试选拔人才。明清时考生先通过县、府、院三级考试取得秀才身份，再赴省城参加三年一次的乡"
            "试，中式者称举人。次年春天在京城会试，最后由皇帝主持殿试，排定名次并授予职位。试题多出自四书五经，文章须"
            "按八股格式写成。"
        ),
    ),
    Pair(
        "zh",
        "转账写到一半程序崩溃了，数据会不会乱？",
        (
            "只要两条更新语句放在同一个事务里，就不会出现一方扣款而另一方没有入账的情况。数据库在修改数据页之前先写日"
            "志；重启时，已提交的操作按日志重做，未提交的全部回滚，账户余额恢复到执行之前的状态。注意不要开启自动提"
            "交，否则每条语句会单独生效。"
        ),
    ),
    Pair(
        "zh",
        "周末来公司干活，之后能休回来吗？",
        (
            "员工因工作需要在休息日加班的，须提前一天在系统中提交申请，由部门经理批准后方可生效。经批准的工时优先安排"
            "调休，按一比一折算，以半天为最小单位，应当在三个月之内用完；因业务繁忙确实无法安排的，按照本人小时工资的"
            "两倍支付报酬。法定节假日的加班不适用调休，一律按三倍工资结算。管理岗位和实行不定时工作制的人员另行规定。"
            "每月累计加班不得超过三十六小时，超出部分系统会自动拒绝。调休时请至少提前两天告知同组同事，并把手头的事情"
            "交接清楚。"
        ),
    ),
    Pair(
        "zh",
        "吃完饭以后身体怎样让血糖回落？",
        (
            "米饭和面食消化后变成葡萄糖，经小肠吸收进入血液，浓度在半小时到一小时内达到高峰。胰腺中的贝塔细胞察觉到这"
            "一变化，便释放胰岛素。这种激素像钥匙一样让肌肉和脂肪细胞打开通道，把糖分收进去使用或储存；肝脏则把多余的"
            "部分合成糖原，留到两餐之间慢慢放出。健康的人大约两小时后就恢复到餐前水平。如果细胞对胰岛素反应迟钝，胰腺"
            "只好加倍分泌，时间久了力不从心，血糖便长期偏高。饭后散步二十分钟，能使肌肉直接消耗一部分糖，减轻胰腺的负"
            "担。"
        ),
    ),
)
