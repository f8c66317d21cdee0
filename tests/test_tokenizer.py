"""Text to tokens and back: one BOS, the EOS set, streams of characters, and chat templates as transformers renders them."""

import json
import re
import time
from dataclasses import replace
from functools import partial

import jinja2
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tunix_lite.models import chat_template
from tunix_lite.models.chat_template import PRESETS, ChatTemplate
from tunix_lite.models.source import ModelConfig, locate
from tunix_lite.models.tokenizer import Tokenizer, as_data
from tunix_lite.models.turns import TurnTokens

TEXTS = ["Hello, world!", "Grüße, 你好!", "🦜🏴‍☠️ and é", "a\n\n  b\tc", "x" * 40, "\ufffd stays", ""]
CORPUS = ["the user asks, the assistant answers: hello world 0123456789\n", *TEXTS]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def byte_level(special: list[str], single: str | None = None) -> tokenizers.Tokenizer:
    """Qwen's and Llama's kind; `single` is what the post-processor makes of a text."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(special)
    if single:
        template = processors.TemplateProcessing(single, special_tokens=[(t, made.token_to_id(t)) for t in special])
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return made


def byte_fallback(special: list[str], single: str | None = None) -> tokenizers.Tokenizer:
    """Gemma's kind: what has no piece of its own is written in byte tokens."""
    pieces = [*special, "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *map(chr, range(33, 127))]
    pieces += ["▁", "\n", "▁t", "he", "▁the"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(special)
    if single:
        made.post_processor = processors.TemplateProcessing(single, special_tokens=[(t, vocab[t]) for t in special])
    return made


GEMMA = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write(folder, backend, template=None, *, bos=None, eos, pad=None, eos_ids=None, config=None):
    """A model's folder, less the model."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": pad} | (config or {})
    config.setdefault("bos_token", bos)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    eos_ids = backend.token_to_id(eos) if eos_ids is None else eos_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
    return folder


def gemma(folder, template=None, single="<bos> $A", **more):
    return write(
        folder, byte_fallback(GEMMA, single), template, bos="<bos>", eos="<eos>", pad="<pad>", eos_ids=[1, 4], **more
    )


def llama(folder, template=None, single="<|begin_of_text|> $A", **more):
    return write(folder, byte_level(LLAMA, single), template, bos=LLAMA[0], eos="<|eot_id|>", **more)


def qwen(folder, template=None, **more):
    return write(folder, byte_level(QWEN), template, eos="<|im_end|>", pad="<|endoftext|>", **more)


# --- what a folder says


def test_the_ends_are_those_of_both_configs_and_else_the_eos_by_name(tmp_path):
    folder = gemma(tmp_path / "g", CHATML)
    assert Tokenizer.load(folder).eos_ids == (1, 4)
    (folder / "config.json").write_text('{"eos_token_id": 0, "text_config": {"eos_token_id": [4, 3]}}')
    assert Tokenizer.load(folder).eos_ids == (1, 4, 0, 3)
    (folder / "generation_config.json").unlink()
    assert Tokenizer.load(folder).eos_ids == (0, 4, 3)
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": "4"}}')
    with pytest.raises(ValueError, match="config.json: text_config: eos_token_id='4'; it is the number of a token"):
        Tokenizer.load(folder)
    (folder / "config.json").unlink()
    assert Tokenizer.load(folder).eos_ids == (1,)  # that is <eos>, by name


def test_truncation_and_padding_that_a_file_carries_are_not_ours(tmp_path):
    backend = byte_level(QWEN)
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    made = Tokenizer.load(write(tmp_path / "q", backend, CHATML, eos="<|im_end|>"))
    assert made.decode(made.encode("hello hello hello hello")) == "hello hello hello hello"


@pytest.mark.parametrize("where", ["jinja", "config", "list", "legacy", "config before legacy"])
def test_a_template_is_found_in_each_of_its_places(tmp_path, where):
    mine = "mine {{ messages[0].content }}"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": mine}]
    config = {"config": mine, "config before legacy": mine, "list": named, "jinja": "no"}
    folder = qwen(tmp_path / "q", mine if where == "jinja" else None, config={"chat_template": config.get(where)})
    if "legacy" in where:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": mine if where == "legacy" else "no"}))
    assert Tokenizer.load(folder).chat([{"role": "user", "content": "ü"}]) == "mine ü"


def test_special_tokens_of_every_kind_reach_the_template(tmp_path):
    config = {"eos_token": {"content": "<|im_end|>"}, "add_bos_token": True}
    config |= {"extra_special_tokens": {"image_token": "<img>"}}
    template = "{{ eos_token }} {{ image_token }} {{ bos_token is defined }} {{ add_bos_token is defined }}"
    made = Tokenizer.load(qwen(tmp_path / "q", template, config=config))
    assert made.chat([{"role": "user", "content": ""}]) == "<|im_end|> <img> False False"
    folder = qwen(tmp_path / "r", template)
    (folder / "special_tokens_map.json").write_text(json.dumps({"image_token": "<old>"}))
    assert "<old>" in Tokenizer.load(folder).chat([{"role": "user", "content": ""}])


@pytest.mark.parametrize(
    "file, text, says",
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": ""}]}',
            "a list holds objects of name and template, one of them `default`",
        ),
        ("generation_config.json", '{"eos_token_id": []}', "names no end-of-sequence token"),
        ("tokenizer_config.json", '{"chat_template": "\\n\\n{% for %}"}', "config.json has an error in line 3"),
    ],
)
def test_a_file_that_says_too_little_is_named(tmp_path, file, text, says):
    folder = write(tmp_path / "q", byte_level(["</s>"]), eos="</s>", config={"eos_token": None})
    (folder / file).unlink(missing_ok=True)
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(ValueError, match=says):
        Tokenizer.load(folder)


# --- one BOS


def test_a_bos_is_there_exactly_once_whoever_writes_it(tmp_path):
    without, with_bos = CHATML, "{{ bos_token }}" + CHATML
    for i, (template, single) in enumerate(
        [(with_bos, "<|begin_of_text|> $A"), (without, "<|begin_of_text|> $A"), (with_bos, None)]
    ):
        made = Tokenizer.load(llama(tmp_path / str(i), template, single))
        bos = made.backend.token_to_id("<|begin_of_text|>")
        for asked in ("hello", [{"role": "user", "content": "hello"}]):
            ids = made.prompt(asked)
            assert ids[0] == bos and ids.count(bos) == 1
    made = Tokenizer.load(qwen(tmp_path / "q", CHATML))
    assert made.prompt("hi") == made.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_second_bos_is_refused_but_a_token_that_opens_every_turn_is_none(tmp_path):
    for i, (template, text) in enumerate([("{{ bos_token }}{{ bos_token }}", "x"), (CHATML, "x <|begin_of_text|>")]):
        for single in ("<|begin_of_text|> $A", None)[: 2 - i]:
            with pytest.raises(ValueError, match=r"more than one <\|begin_of_text\|>"):
                Tokenizer.load(llama(tmp_path / "l", template, single)).prompt(text)
    made = Tokenizer.load(write(tmp_path / "s", byte_level(QWEN), CHATML, bos="<|im_start|>", eos="<|im_end|>"))
    assert made.prompt("hi").count(made.backend.token_to_id("<|im_start|>")) == 2


@pytest.mark.parametrize("single", ["<bos> $A", "<bos> $A <eos>", "$A <eos>", None])
def test_a_model_without_a_template_goes_on_with_plain_text(tmp_path, single):
    made = Tokenizer.load(gemma(tmp_path / "g", None, single))
    assert not made.has_chat_template
    start = [2] if single and single.startswith("<bos>") else []
    assert made.prompt("the 你") == start + made.encode("the 你")
    assert made.prompt("<bos>the") == made.encode("<bos>the")
    assert made.demonstration("2 + 2 =", " 4") == [*made.encode(" 4"), 1]
    assert made.demonstration("2 + 2 =", " 4<eos> 5") == [*made.encode(" 4"), 1]
    for call in (made.chat, made.prompt):
        with pytest.raises(ValueError, match="has no chat template .* base model"):
            call([{"role": "user", "content": "hi"}])


def test_a_demonstration_ends_as_the_template_ends_a_turn(tmp_path):
    made = Tokenizer.load(qwen(tmp_path / "q", CHATML))
    assert made.demonstration("hi", "ho") == made.encode("ho<|im_end|>")
    open_end = "{% for m in messages %}{{ m.content }} {% endfor %}"
    made = Tokenizer.load(qwen(tmp_path / "r", open_end))
    assert made.demonstration("hi", "ho") == made.encode("ho <|im_end|>")


def test_what_the_template_ends_a_turn_with_ends_a_completion(tmp_path):
    """Base models of Qwen name <|endoftext|> alone, and their template writes <|im_end|>."""
    base = Tokenizer.load(write(tmp_path / "base", byte_level(QWEN), CHATML, eos="<|endoftext|>"))
    assert base.eos_ids == tuple(map(base.backend.token_to_id, ("<|endoftext|>", "<|im_end|>")))
    assert base.demonstration("hi", "ho") == base.encode("ho<|im_end|>")
    again = [user("hi"), model("ho"), user("?")]
    assert base.between(again[:2], again) == base.encode("\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")
    assert TurnTokens(base).between("?", ended=True) == base.between(again[:2], again)
    assert Tokenizer.load(write(tmp_path / "plain", byte_level(QWEN), eos="<|endoftext|>")).eos_ids == base.eos_ids[:1]
    # a template of another model, whose ends are no tokens here, and one that refuses conversations
    for template in (CHATML, "{{ raise_exception('no') }}"):
        assert Tokenizer.load(gemma(tmp_path / "g", template)).eos_ids == (1, 4)


def test_flags_of_tokenizer_config_win_over_those_of_tokenizer_json(tmp_path):
    """As in transformers; here whether a token takes the spaces before it, and one that tokenizer.json lacks."""
    flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    tool = {"content": "<tool>"} | flags | {"lstrip": False}
    more = {"added_tokens_decoder": {"321": {"content": "<|im_start|>"} | flags, "323": tool}}
    folder = write(tmp_path / "q", byte_level(QWEN), CHATML, eos="<|im_end|>", config=more)
    made = Tokenizer.load(folder)
    start = made.backend.token_to_id("<|im_start|>")
    assert made.encode("a  <|im_start|>b") == [*made.encode("a"), start, *made.encode("b")]
    assert made.encode("<tool>") == [made.backend.get_vocab_size() - 1]
    text = as_data("a  <|im_start|>", [(3, 15)], "text")
    assert start not in made.written_ids(text)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for asked in ("a  <|im_start|>b", "a <tool> b", "a <|im_end|> b"):
        assert made.encode(asked) == theirs(asked, add_special_tokens=False)["input_ids"]


def test_a_token_without_an_embedding_is_refused_wherever_it_stands(tmp_path):
    made = replace(Tokenizer.load(qwen(tmp_path / "q", CHATML)), vocab_size=321)
    assert made.beyond == {321: "<|im_start|>", 322: "<|im_end|>"}
    text = as_data("a <|im_end|>", [(2, 12)], "text")
    assert max(made.written_ids(text)) < 320, "as letters it has embeddings"
    for call in (partial(made.encode, "a <|im_end|>"), partial(made.prompt, "hi")):
        with pytest.raises(ValueError, match=r"holds '<\|im_(start|end)\|>', token 32[12] .* for 321 tokens"):
            call()


def test_a_template_that_writes_earlier_turns_anew_is_refused_with_what_to_do(tmp_path):
    begins_anew = "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    made = Tokenizer.load(qwen(tmp_path / "q", begins_anew))
    with pytest.raises(ValueError, match="differently from its prompt.*; choose a model, or write a chat_template.j"):
        made.demonstration("hi", "there")
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="differently when others follow.*set task.learned_turns=last"):
        made.between(earlier, [*earlier, {"role": "user", "content": "c"}])


def test_another_template_takes_the_place_of_that_of_the_folder_with_its_ends(tmp_path):
    for template in (None, "{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}"):
        made = Tokenizer.load(write(tmp_path / "q", byte_level(QWEN), template, eos="<|endoftext|>"))
        made = made.with_template(ChatTemplate.compile(CHATML, "mine.jinja"))
        assert made.prompt("hi") == made.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert [made.backend.id_to_token(i) for i in made.eos_ids] == ["<|endoftext|>", "<|im_end|>"]


# A turn that calls a tool ends as Gemma 4's do: by opening the result, or as any other turn.
CALLING = """{% for m in messages %}<|turn>{{ m.role }}
{% for call in m.tool_calls or [] %}<|call>{{ call.function.name }}{{ call.function.arguments | tojson }}<call|>{% endfor %}
{{ m.content }}{% if m.tool_calls %}BEHIND{% else %}<turn|>{% endif %}

{% endfor %}"""


@pytest.mark.parametrize("behind", ["<|result>", "<turn|>", "<call|>", ""])
def test_what_the_template_ends_a_turn_that_calls_a_tool_with_ends_a_completion(tmp_path, behind):
    """A token that is not special, as Qwen's </tool_call>, ends a call and no turn."""
    backend = byte_level(["<eos>", "<|turn>", "<turn|>", "<|call>", "<|result>"])
    backend.add_tokens(["<call|>"])
    made = Tokenizer.load(write(tmp_path / "g", backend, CALLING.replace("BEHIND", behind), eos="<eos>"))
    ends = ["<eos>", "<turn|>", *(["<|result>"] if behind == "<|result>" else [])]
    assert [backend.id_to_token(i) for i in made.eos_ids] == ends
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    if behind == "<|result>":
        assert made.decode(made.demonstration("hi", call), skip_special=False).endswith("<|call>f{}<call|><|result>")


# --- templates for base models, and variables

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
]
# each turn of TALK and of the model, written by hand from what these models were trained on
PRESET_TURNS = {
    "chatml": [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\n 2 + 2?<|im_end|>\n",
        "<|im_start|>assistant\n4<|im_end|>\n",
        "<|im_start|>user\nSure?<|im_end|>\n",
        "<|im_start|>assistant\n",
    ],
    "llama3": [
        "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ],
    "gemma": [
        "<bos><start_of_turn>user\nBe brief.\n\n",
        "2 + 2?<end_of_turn>\n",
        "<start_of_turn>model\n4<end_of_turn>\n",
        "<start_of_turn>user\nSure?<end_of_turn>\n",
        "<start_of_turn>model\n",
    ],
    "plain": ["System: Be brief.\n\n", "User: 2 + 2?\n\n", "Assistant: 4<eos>\n\n", "User: Sure?\n\n", "Assistant:"],
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_writes_conversations_as_models_of_its_kind_know_them(name):
    text = PRESETS[name].read_text()
    for compiled in (ChatTemplate.compile(text, name), ChatTemplate.compile(text + "{# a stranger's #}", name)):
        assert (compiled.compiled is None) == ("stranger" in compiled.text)
        for count, more in ((4, True), (4, False), (3, False), (2, True)):
            expected = "".join([*PRESET_TURNS[name][:count], *(PRESET_TURNS[name][4:] if more else [])])
            values = {"add_generation_prompt": more, "bos_token": "<bos>", "eos_token": "<eos>"}
            assert compiled.render(messages=TALK[:count], **values) == expected


def test_a_preset_needs_the_token_that_ends_its_turns(tmp_path):
    """The bundled tokenizer has Gemma's tokens; letters that spell <|im_end|> would never end a turn."""
    located = {name: locate(ModelConfig(chat_template=name)).tokenizer for name in ("gemma", "plain")}
    assert located["gemma"].demonstration("hi", "ho") == located["gemma"].encode("ho<end_of_turn>")
    assert located["plain"].demonstration("hi", "ho") == located["plain"].encode(" ho<eos>")
    fit = "write model.chat_template=gemma or model.chat_template=plain$"
    for name in ("chatml", "llama3"):
        with pytest.raises(ValueError, match=f"model.chat_template: {name} ends a turn with what is no token .* {fit}"):
            locate(ModelConfig(chat_template=name))
    with pytest.raises(ValueError, match="model.chat_template: chat-ml is not a file, .*model.chat_template=chatml$"):
        locate(ModelConfig(chat_template="chat-ml"))


def test_variables_of_the_settings_reach_the_template_everywhere_and_a_caller_may_say_otherwise(tmp_path):
    made = Tokenizer.load(qwen(tmp_path / "q", QWEN_3_TEMPLATE))
    silent = made.with_template(made.template.with_variables({"enable_thinking": False}))
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    no_thought = "<think>\n\n</think>\n\n"
    assert silent.prompt("hi") == TurnTokens(silent).prompt("hi") == made.encode(asked + no_thought)
    assert silent.eos_ids == made.eos_ids
    assert silent.prompt("hi", enable_thinking=True) == made.prompt("hi") == made.encode(asked)
    assert TurnTokens(silent).between("hi", ended=True) == made.encode("\n" + asked + no_thought)
    # the text that an export carries needs no settings
    alone = made.with_template(ChatTemplate.compile(silent.template.standalone, "alone"))
    assert alone.prompt("hi") == silent.prompt("hi") and alone.prompt("hi", enable_thinking=True) == made.prompt("hi")
    said = {"a": "it's %} }} \"ü\n", "b": [1, None, {"c": 0.5}], "d": True}
    template = ChatTemplate.compile("\n  {{ a }}{{ b | tojson }}{{ d }}", "x").with_variables(said)
    written = '\n  it\'s %} }} "ü\n[1, null, {"c": 0.5}]True'
    assert template.render() == ChatTemplate.compile(template.standalone, "y").render() == written


@pytest.mark.parametrize(
    "text, names",
    [
        ("{{ messages }}{{ bos_token }}{{ x }}{% for y in x %}{{ y }}{% endfor %}", "reads x"),
        ("{{ tools }}{% set x = 1 %}{{ x }}{{ strftime_now('%d') }}", "has no variables"),
        # what only a branch sets is the template's own, unless it asks for it first
        ("{% if messages %}{% set x = 1 %}{% endif %}{{ x }}{{ y }}", "reads y"),
        ("{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}", "reads x"),
        ("{% if messages %}{% set x %}a{% endset %}{% set y, z = 1, 2 %}{% endif %}{{ x }}{{ w }}", "reads w"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused_with_those_that_it_does(text, names):
    with pytest.raises(ValueError, match=f"the chat template in q.jinja does not read 'efort'.*; it {names}$") as said:
        ChatTemplate.compile(text, "q.jinja").with_variables({"efort": 1})
    assert ("did you mean model.template.effort=...?" in str(said.value)) == ("effort" in text)


# --- texts that spell special tokens and mean none


def as_if_there_were_none(backend, text: str) -> list[int]:
    """The tokens of a text by a tokenizer whose file knows no special tokens at all."""
    file = json.loads(backend.to_str())
    file["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(file)).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("family", ["gemma", "qwen3", "llama3"])
def test_a_quoted_special_token_is_the_tokens_of_its_letters(tmp_path, family):
    """Between the template's own tokens stands what a tokenizer without special tokens makes of the text there. A text
    without special tokens has the same tokens quoted or not."""
    make, template = FAMILIES[family]
    made = Tokenizer.load(make(tmp_path / "m", template))
    special = {t.content: i for i, t in made.backend.get_added_tokens_decoder().items()}
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", made.chat([user("QQQ")]))
    own = [i for i in made.demonstration("x", "y") if i in special.values()]
    names = {"gemma": GEMMA, "llama3": LLAMA}.get(family, QWEN)
    for text in [asked.replace("{}", name) for asked in ("a {} b", "{}{}the ", " {}\n") for name in names]:
        quoted = as_data(text, made.special_in(text), "text")
        message = text.strip() if family in ("gemma", "llama3") else text  # as those templates do
        expected = []
        for at, part in enumerate(parts):
            letters = part.replace("QQQ", message)
            expected += [special[part]] if at % 2 else as_if_there_were_none(made.backend, letters)
        ids = made.prompt(quoted)
        assert ids == [*made.start_ids[: len(made.start_ids) * (ids[0] not in expected[:1])], *expected]
        assert [i for i in made.demonstration(quoted, quoted) if i in special.values()] == own
    for text in [text for text in TEXTS if len(text) > 3]:
        for quoted in (text, as_data(text, [(1, 3)], "text")):  # the second goes the other way
            assert made.special_in(text) == [] and made.prompt(quoted) == made.prompt(text)
            assert made.demonstration(quoted, quoted) == made.demonstration(text, text)


def test_a_template_that_changes_texts_beyond_recognition_is_refused(tmp_path):
    escapes = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}"
    made = Tokenizer.load(qwen(tmp_path / "q", escapes))
    with pytest.raises(ValueError, match=r"the chat template does not write '\"a <\|im_end\|>\"' as it is"):
        made.prompt(as_data("a <|im_end|>", [(2, 12)], "text"))
    for i, place in enumerate((0, -1)):
        cuts = "{% for m in messages %}{{ m.content.split('<|im_end|>')[" + str(place) + "] }}{% endfor %}"
        made = Tokenizer.load(qwen(tmp_path / f"cut{i}", cuts))
        with pytest.raises(ValueError, match=f"the chat template does not write '{'ab'[place]}' as it is"):
            made.prompt(as_data("a<|im_end|>b", [(1, 11)], "text"))
    for fails in ("raise_exception('not ' ~ m.content)", "[m.content] + m.content"):
        made = Tokenizer.load(qwen(tmp_path / fails[:3], "{% for m in messages %}{{ " + fails + " }}{% endfor %}"))
        with pytest.raises(ValueError, match="the chat template in") as failed:
            made.prompt(as_data("a <|im_end|>", [(2, 12)], "text"))
        assert "U000ff" not in str(failed.value) and max(map(ord, str(failed.value))) < 0xFF000
        assert "raise" not in fails or "not a <|im_end|>" in str(failed.value), "its words are there"
    made = Tokenizer.load(qwen(tmp_path / "r", escapes.replace("ensure_ascii=true", "")))
    assert made.backend.token_to_id("<|im_end|>") not in made.prompt(as_data("a <|im_end|>", [(2, 12)], "text"))


@pytest.mark.parametrize("cut", ["[:29]", "[19:]", "[:-1]", ".split('|im_end|')[0]"])
def test_a_template_that_cuts_what_is_marked_makes_no_control_token_of_it(tmp_path, cut):
    template = "{% for m in messages %}{{ m.content" + cut + " }}<|im_end|>{% endfor %}"
    made = Tokenizer.load(qwen(tmp_path / "q", template))
    with pytest.raises(ValueError, match="the chat template does not write .* as it is"):
        made.prompt(as_data("a <|im_end|>", [(2, 12)], "text"))


def test_marks_of_many_special_tokens_take_linear_time():
    count = 100_000
    began = time.process_time()
    marked = as_data("<s>" * count, [(i, i + 3) for i in range(0, 3 * count, 3)], "text")
    assert time.process_time() - began < 5 and marked.count("<s>") == count


# --- streams


@pytest.mark.parametrize("kind, step, skip_special", [(gemma, 1, True), (llama, 3, False), (llama, 1, True)])
def test_a_stream_gives_whole_characters_that_add_up_to_the_text(tmp_path, kind, step, skip_special):
    made = Tokenizer.load(kind(tmp_path / "m", CHATML))
    end = "<end_of_turn>" if kind is gemma else "<|eot_id|>"
    for text in [*TEXTS, f"你{end}好", " ".join(TEXTS) * 3]:
        for cut in (0, 1, 2):  # the last tokens left off: a character may be broken for good
            ids = made.encode(text + end)[: -1 - cut or None]
            stream = made.stream(skip_special)
            pieces = [stream.feed(ids[i : i + step]) for i in range(0, len(ids), step)]
            if not cut and "\ufffd" not in text:
                assert not any("\ufffd" in piece for piece in pieces)
            assert "".join(pieces) + stream.end() == made.decode(ids, skip_special)


# --- templates are strangers' programs


def test_templates_get_tools_the_day_and_variables_of_the_caller(tmp_path, monkeypatch):
    class Clock:
        @staticmethod
        def now():
            return __import__("datetime").datetime(2024, 7, 26)

    monkeypatch.setattr(chat_template, "datetime", Clock)
    template = (
        "{{ strftime_now('%d %b %Y') }}{{ tools | tojson }}{{ documents }}{{ thinking }}{{ add_generation_prompt }}"
    )
    made = Tokenizer.load(qwen(tmp_path / "q", template))
    asked = [{"role": "user", "content": "hi"}]
    said = made.chat(asked, tools=[{"b": "<é>", "a": (1, None)}], thinking=False)
    assert said == '26 Jul 2024[{"b": "<é>", "a": [1, null]}]NoneFalseTrue'
    assert made.chat(asked, add_generation_prompt=False) == "26 Jul 2024nullNoneFalse"
    assert made.prompt("hi", thinking=1) == made.encode("26 Jul 2024nullNone1True")


# --- byte for byte what transformers says: templates written here in the manner of each family

GEMMA_TEMPLATE = r"""{{ bos_token }}
{%- set turns = messages -%}
{%- set opening = '' -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set turns = messages[1:] -%}
    {%- set opening = messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text'] -%}
    {%- set opening = opening + '\n\n' -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and model take turns') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\n' + (opening if loop.first else '') }}
    {%- if turn['content'] is string -%}
        {{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable -%}
        {%- for part in turn['content'] -%}{{ part['text'] | trim if part['type'] == 'text' else '<image>' }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception('neither text nor parts') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""
QWEN_25_TEMPLATE = r"""{%- set first = messages[0]['content'] if messages[0]['role'] == 'system' else 'You help.' %}
{{- '<|im_start|>system\n' + first }}
{%- if tools %}
    {{- "\n\n# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools> {\"name\": <name>, \"arguments\": <args>}" }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
QWEN_3_TEMPLATE = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- if tools %}{%- for tool in tools %}{{- tool | tojson(indent=2, sort_keys=true) }}{%- endfor %}{%- endif %}
{%- set ns = namespace(looking=true, last_asked=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == "user" and message.content is string and not message.content.startswith('<tool_response>') %}
        {%- set ns.looking = false %}
        {%- set ns.last_asked = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_asked and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {%- generation %}{{- content.lstrip('\n') + '<|im_end|>' }}{%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role in ('user', 'tool') or not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_TEMPLATE = r"""{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{#- the system's words go to the front #}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" }}
{%- if tools is defined and tools is not none %}
    {%- if messages | length == 0 %}{{- raise_exception("there is no user message to put tools in") }}{%- endif %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
{%- endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {{- message.content | tojson if message.content is mapping else message.content }}
        {{- "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
FAMILIES = {
    "gemma": (gemma, GEMMA_TEMPLATE),
    "qwen2.5": (qwen, QWEN_25_TEMPLATE),
    "qwen3": (qwen, QWEN_3_TEMPLATE),
    "llama3": (llama, LLAMA_TEMPLATE),
    "marked": (
        qwen,
        "{% for m in messages %}{% set x = 1 %}{% generation %}{% set x = 2 %}{{ m.role }}{% endgeneration %}{{ x }}\n\n{% if loop.index == 2 %}\n{% break %}{% endif %}{% endfor %}\n{{ dict(a=1) }}{{ dict.fromkeys('ab') }}{{ namespace(self=3).self }}",
    ),
}
PARAMETERS = {"z": 1, "a": [1.5, None, True]}
ADD = {"name": "add", "description": "<b>'sum' & more — é</b>", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": ADD}
CALL = {"role": "assistant", "content": None}
CALL |= {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "ü<"}}}]}


def user(text):
    return {"role": "user", "content": text}


def model(text, **more):
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS = {
    "one": [user("What is 2 + 2?")],
    "system": [{"role": "system", "content": " Be brief.\n"}, user("  Hi \n"), model("\n Hello.  "),
               user("Grüße, 你好 🦜?")],
    "lines": [user("a\n\n  b\r\n\tc\n"), model("<think>\nhm\n</think>\n\nyes"), user(""), model("<think>so</think>no")],
    "marks": [user("{{ 7 * 7 }} {% if %} <b>&amp;</b> \\n"), model('it\'s "quoted"')],
    "parts": [user([{"type": "text", "text": " one "}, {"type": "image"}, {"type": "text", "text": "two"}])],
    "reasoning": [user("x"), model("y", reasoning="why\n", name=None),
                  user("<tool_response>z</tool_response>"), model("w", thinking="v")],
    "tools": [user("add"), CALL, {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, model("7")],
    "wrong": [model("I speak first"), user("no")],
}  # fmt: skip
VARIABLES = [
    {},
    {"tools": [TOOL]},
    {"tools": [TOOL], "date_string": "1 Jan 2020"},
    {"enable_thinking": False, "documents": [{"title": "t", "text": "x"}]},
]


# What transformers lets through: what a template raises, and what Python does where one adds a list to a text.
REFUSALS = jinja2.TemplateError, TypeError


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """family -> ours and theirs, loaded from one folder."""
    transformers = pytest.importorskip("transformers")
    loaded = {}
    for name, (make, template) in FAMILIES.items():
        folder = make(tmp_path_factory.mktemp("families") / name, template)
        loaded[name] = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    return loaded


def outcome(call, *refusals):
    """What comes out, or that it is refused, and with nothing but these errors."""
    try:
        return call()
    except refusals:
        return "refused"


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_templates_say_byte_for_byte_what_they_say_in_transformers(both, family, messages):
    ours, theirs = both[family]
    for variables in VARIABLES:
        for more in (True, False):
            values = {"add_generation_prompt": more, **variables}
            mine = outcome(partial(ours.chat, messages, **values), ValueError)
            render = partial(theirs.apply_chat_template, messages, tokenize=False, **values)
            assert mine == outcome(render, *REFUSALS)
            if mine == "refused":
                continue
            ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **values)
            assert ours.encode(mine) == ids
            if more and family != "marked":
                assert ours.prompt(messages, **variables) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


@pytest.mark.parity
def test_special_tokens_and_plain_texts_are_those_of_transformers(both):
    for ours, theirs in both.values():
        assert {k: ours.special[k] for k in theirs.special_tokens_map} == theirs.special_tokens_map
        for text in TEXTS:
            assert [*ours.start_ids, *ours.encode(text)] == theirs(text)["input_ids"]
