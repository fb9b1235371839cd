"""Identifying text in Chinese: names by label, title and verb, hospitals, addresses, dates, ages and numbers.

Chinese has no spaces and no capitals, so a name is known by what stands before it (*患者*, *报告医师：*) or behind
it (*医生*, *女士*) and by its surname. `latin` prepares a text for all other patterns: Chinese characters become
spaces and full-width signs plain ones, at the same positions.
"""
# ruff: noqa: RUF001, E501 - full-width signs are what is searched for; alternatives are easier to read in long lines

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from shardflow.packing.deid.text_patterns import Category, Span, spans_of

_HAN: Final = "\u3400-\u4dbf\u4e00-\u9fff"
_IS_CHINESE: Final = re.compile(f"[{_HAN}]")
_WIDE: Final = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}
_BLANK: Final = re.compile(f"[{_HAN}\u3000-\u303f]")

_SURNAMES: Final = (
    "(?:欧阳|司马|上官|诸葛|东方|皇甫|尉迟|公孙|慕容|令狐|司徒|夏侯|长孙|宇文|端木|南宫|轩辕"
    "|[王李张刘陈杨黄赵吴周徐孙马朱胡郭何林罗高郑梁谢宋唐许韩冯邓曹彭曾肖田董潘袁蔡蒋余于杜叶程苏魏吕丁任沈姚卢姜崔钟谭陆汪范金石廖贾夏韦付方白邹孟熊秦邱江尹薛闫段雷侯龙史陶黎贺顾毛郝龚邵"
    "万钱严覃武戴莫孔汤常温康施文牛樊葛邢安齐易乔伍庞颜倪庄聂章鲁岳翟殷詹申欧耿关兰焦俞左柳甘祝包宁尚符舒阮柯纪梅童凌毕单季裴霍涂成苗谷盛曲翁冉骆蓝路游辛靳欧管柴蒙鲍华喻祁蒲房滕屈饶解牟艾尤阳穆农司卓"
    "古吉缪简车项连芦麦褚娄窦戚岑景党宫费卜冷晏席卫米柏宗瞿桂全佟应臧闵苟邬边卞姬师和仇栾隋商刁沙荣巫寇桑郎甄丛仲虞敖巩明佘池查麻苑迟邝])"
)
_STOP: Final = "因于在为的曾诉来男女入行今已签自由与主教医先老副护技院同可对及等后前示提经未有无请处并"
_GIVEN: Final = f"(?:(?![{_STOP}])[{_HAN}])"
_NAME: Final = f"{_SURNAMES}{_GIVEN}{{1,2}}"
_PEOPLE: Final = (
    "(?:患者|病人|受检者|病患)?(?:姓名|名字)|(?:报告|审核|诊断|送检|申请|主治|检查|书写|经治|管床|会诊|操作|手术|麻醉|接诊|值班|影像)?(?:医师|医生|大夫)"
    "|技师|技术员|护士|护师|签名|签字|签署|记录者|书写者|记录人|联系人|报告人|审核人|录入员?|登记员|操作者|监护人|陪同"
)
_LABELLED: Final = re.compile(
    rf"(?:{_PEOPLE})\s*[：:]\s*(?P<name>[{_HAN}·]{{2,6}})|(?:{_PEOPLE})\s+(?P<other>{_NAME})"
)
_MENTIONED: Final = re.compile(
    rf"(?:患者|病人|家属|父亲|母亲|丈夫|妻子|儿子|女儿|患儿|产妇|患方)[：:]?(?P<name>{_NAME})"
    rf"(?=[，,。；;、\s（(：:]|因|于|在|签|男|女|诉|为|入|陪|到|来|$)"
)
_BEFORE_TITLE: Final = re.compile(
    rf"(?P<name>{_SURNAMES}[{_HAN}]{{0,2}}?)(?=(?:副?主任|主治|住院|值班)?(?:医生|医师|主任|教授|护士长?|先生|女士|小姐|大夫|院长|技师|护师|老师|同志))"
)
_NO_NAME: Final = re.compile("管床|经治|高年|高级|全科|和主|应主|华侨|金牌|白班|安排|师|主|请")
_FOUND_BY: Final = re.compile(
    rf"(?:由|与|和|向|告知|通知|请|致|经|联系)(?P<name>{_NAME})(?=复核|签|报告|沟通|讨论|会诊|审核|确认)"
)
_HOSPITAL: Final = re.compile(
    rf"(?:^|[^{_HAN}]|[由自于在从到经往赴至（])(?P<place>(?:(?![由于在从到经往赴至])[{_HAN}]){{2,16}}?"
    r"(?:医院|卫生院|诊所|保健院|疗养院|卫生服务中心|医疗中心|医学中心|体检中心))"
)
_NO_HOSPITAL: Final = re.compile(
    "(?:我|本|外|当地|上级|某|该|贵|他|原|下级|外地|基层|综合|专科|其他)+(?:家|所)?医院|(?:患者)?(?:曾|既往)?(?:外|我)院"
)
_ADDRESS: Final = re.compile(
    rf"(?:地址|住址|家住|现居|现住|住在|居住(?:于|在)|户籍(?:地)?|籍贯|出生地|工作单位|单位|来自)[：:]?\s*(?P<place>[{_HAN}A-Za-z0-9\-]{{2,40}})"
    rf"|(?P<town>[{_HAN}]{{2,7}}(?:省|自治区|市|自治州))(?=[{_HAN}]*?(?:区|县|镇|乡|路|街|道|村|号))"
    rf"|(?P<street>[{_HAN}]{{2,10}}(?:路|街|大道|巷|弄|村|小区|花园)\d{{1,5}}号?(?:\d+[{_HAN}]{{1,2}})*)"
)
_DATE: Final = re.compile(
    r"(?P<date>(?<!\d)(?:(?:19|20)\d\d年(?:\d{1,2}月份?(?:\d{1,2}[日号])?)?|\d\d年\d{1,2}月(?:\d{1,2}[日号])?)|\d{1,2}月\d{1,2}[日号]"
    r"|[一二〇零○]?[九〇零○一二三四五六七八]{2,4}年[一二三四五六七八九十]{1,2}月(?:[一二三四五六七八九十]{1,3}[日号])?)"
)
_TIME: Final = re.compile(
    r"(?P<time>(?<!\d)(?:[01]?\d|2[0-3])[:：][0-5]\d(?:[:：][0-5]\d)?(?!\d)|(?<!\d)(?:[01]?\d|2[0-3])[时点](?:[0-5]?\d分)(?:[0-5]?\d秒)?)"
)
_AGE: Final = re.compile(
    r"(?P<age>(?<![\d.])(?:9\d|1[0-4]\d)|九十[一二三四五六七八九]?|一百(?:零?[一二三四五六七八九]|一十)?(?:[一二三四五六七八九]十)?)(?=\s*(?:周?岁|多岁|余岁))"
    r"|年龄[：:]?\s*(?P<other>9\d|1[0-4]\d)(?!\d)"
)
_NUMBER: Final = re.compile(
    r"(?:住院|门诊|病案|病历|病例|检查|影像|放射|申请单?|登记|就诊|患者|病人|床位?|医保|社保卡?|身份证|护照|银行|账|帐|账户|账号|帐号|卡|证书|资格证|执业证书|设备|序列|产品"
    r"|车牌|车辆|牌照|指纹|虹膜|面部照片|照片|图片|编|条码|样本|标本|病理|保单|工|序)(?:号码|编号|账号|号|ID|卡号|证号)?[：:\s]*(?P<id>(?=[^\s，。；]*\d{2})[A-Za-z0-9][A-Za-z0-9\-_/.]{2,40})"
)
_PLATE: Final = re.compile(
    "(?P<id>[京津沪渝冀豫云辽黑湘皖鲁新苏浙赣鄂桂甘晋蒙陕吉闽贵粤青藏川宁琼][A-Z][·\\s]?[A-HJ-NP-Z0-9]{5,6})(?![A-Za-z0-9])"
)
_PHONE: Final = re.compile(
    r"(?<![\dA-Za-z])(?P<number>1[3-9]\d[\s-]?\d{4}[\s-]?\d{4}|0\d{2,3}[\s-]?\d{7,8}|400[\s-]?\d{3}[\s-]?\d{4})(?!\d)"
)


def latin(text: str) -> str:
    """Return a text of the same length whose Chinese characters are spaces and full-width signs plain ones.

    Example:
        >>> latin("住院号：１２３４５６，见")
        '   :123456, '
    """
    if text.isascii() or not _IS_CHINESE.search(text):
        return text
    return _BLANK.sub(" ", text.translate(_WIDE))


def is_chinese(text: str) -> bool:
    """Return whether a text has a Chinese character."""
    return not text.isascii() and _IS_CHINESE.search(text) is not None


def find_chinese_people(text: str) -> Iterator[Span]:
    """Find names by a label, a title, or what the person does."""
    for match in _LABELLED.finditer(text):
        group = "name" if match["name"] is not None else "other"
        yield Span(start=match.start(group), end=match.end(group), category=Category.NAME)
    for pattern in (_MENTIONED, _BEFORE_TITLE, _FOUND_BY):
        for match in pattern.finditer(text):
            if not _NO_NAME.match(match["name"]):
                yield Span(start=match.start("name"), end=match.end("name"), category=Category.NAME)


def find_chinese_places(text: str) -> Iterator[Span]:
    """Find hospitals and addresses."""
    for match in _HOSPITAL.finditer(text):
        if not _NO_HOSPITAL.fullmatch(match["place"]):
            yield Span(start=match.start("place"), end=match.end("place"), category=Category.PLACE)
    yield from spans_of(_ADDRESS, text, Category.PLACE, "place", "town", "street")


def find_chinese_dates(text: str) -> Iterator[Span]:
    """Find dates, times of day, and ages above 89."""
    plain = text.translate(_WIDE)
    yield from spans_of(_DATE, plain, Category.DATE, "date")
    yield from spans_of(_TIME, plain, Category.TIME, "time")
    yield from spans_of(_AGE, plain, Category.AGE, "age", "other")


def find_chinese_numbers(text: str) -> Iterator[Span]:
    """Find numbers after a label, number plates, and telephone numbers."""
    plain = text.translate(_WIDE)
    yield from spans_of(_NUMBER, plain, Category.ID, "id")
    yield from spans_of(_PLATE, plain, Category.ID, "id")
    yield from spans_of(_PHONE, plain, Category.PHONE, "number")
