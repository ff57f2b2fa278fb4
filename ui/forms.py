"""The training form: every widget is made from a field of `RunConfig`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import plotly.graph_objects as go
import streamlit as st

from core.config import PRESET_TITLES, PRESETS, RunConfig, value_in_words
from core.devices.base import DeviceInfo
from core.errors import AppError
from core.schedule import changes_at, changes_between_epochs, lr_at
from core.store import Store
from core.words import stage_in_words
from ui.registry import services
from ui.words import escaped

FIRST_PRESET = "quick"
BUILT_IN_DATA = (
    "builtin:fashion-mnist",
    "builtin:digits",
    "imagenetv2:matched-frequency",
    "imagenetv2:threshold-0.7",
    "imagenetv2:top-images",
    "torchvision:CIFAR10",
    "torchvision:Flowers102",
    "torchvision:OxfordIIITPet",
    "torchvision:Food101",
)
OPTIMIZER_FIELDS = {
    "adam": ("beta1", "beta2", "weight_decay"),
    "adamw": ("beta1", "beta2", "weight_decay"),
    "sgd": ("momentum", "weight_decay"),
}
SCHEDULE_FIELDS = {"step": ("step_epochs", "step_factor")}
SECTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Augmentation": (
        ("augmentation",),
        ("crop_scale_min",),
        ("auto_augment",),
        ("randaugment_ops", "randaugment_magnitude"),
        ("color_jitter", "random_erasing"),
        ("mixup", "cutmix"),
    ),
    "Classes and feeding": (("sampling", "class_weights"), ("val_duplicates", "workers")),
    "Speed and memory": (("matmul_precision",), ("torch_compile",), ("accumulate", "num_devices")),
    "From epoch to epoch": (("trainable_from",), ("first_image_size",)),
    "Steadier training": (("clip_grad_norm", "ema_decay"), ("layer_decay",)),
    "When to save and to end": (("checkpoint_min",), ("patience", "time_limit_min")),
    "Cold or warm": (("process",), ("caches",)),
}
"""The folded parts of the form, by title: rows of fields that stand side by side."""
SHOWN_WHERE = {
    "crop_scale_min": ("augmentation", "resized_crop"),
    "randaugment_ops": ("auto_augment", "randaugment"),
    "randaugment_magnitude": ("auto_augment", "randaugment"),
}
"""The field and the choice without which another field has no meaning."""
CHOICE_WORDS = {
    "head": "Head only",
    "last": "Last stages",
    "all": "All layers",
    "adam": "Adam",
    "adamw": "AdamW",
    "sgd": "SGD",
    "onecycle": "One cycle",
    "constant": "Constant",
    "cosine": "Cosine",
    "step": "Step",
    "none": "None",
    "flip": "Flip",
    "crop": "Crop",
    "resized_crop": "Resized crop",
    "randaugment": "RandAugment",
    "trivialaugment": "TrivialAugment",
    "shuffle": "Shuffle",
    "balanced": "Balanced",
    "keep": "Keep",
    "drop": "Leave out",
    "auto": "Fastest",
    "default": "Default",
    "high": "High",
    "highest": "Highest",
    "off": "Off",
    "on": "On",
    "shared": "This one",
    "own": "A new one",
    "use": "Use",
    "anew": "Make anew",
}
WEIGHTS_WORDS = {
    "at hand": "weights at hand",
    "download": "weights to be downloaded",
    "none": "no pretrained weights",
}
FLOAT_STEPS = {
    "lr": 1e-4,
    "beta1": 0.01,
    "beta2": 0.001,
    "weight_decay": 0.01,
    "warmup_epochs": 0.5,
    "crop_scale_min": 0.05,
    "random_erasing": 0.05,
    "clip_grad_norm": 0.5,
    "ema_decay": 0.001,
    "time_limit_min": 1.0,
    "checkpoint_min": 1.0,
    "layer_decay": 0.05,
}
EMPTY_WORDS = {
    "image_size": "the model's own",
    "first_image_size": "one size in all epochs",
    "trainable_from": "the same in all epochs",
}
"""What it means that a field is empty."""
CAN_BE_AUTO = {"batch_size": "As large as fits"}
"""Numbers that can be found before the run, and what the choice is called."""
AGAIN_KEY = "run_again"
IS_OPENED_KEY = "is_page_opened"
"""Whether the page was another one when it was last drawn."""
PREVIEW_STEPS_PER_EPOCH = 50
PREVIEW_POINTS = 400


def data_options(store: Store) -> list[str]:
    """The data that are known by name, and those of earlier runs."""
    used = [record.config.data for record in store.list_runs()]
    return list(dict.fromkeys([*BUILT_IN_DATA, *used]))


def key_of(name: str) -> str:
    """The session key of a field."""
    return f"form_{name}"


def preset_values(preset: str) -> dict[str, Any]:
    """Every field's value in a preset."""
    return RunConfig(**PRESETS[preset]).model_dump()


def reference_values() -> dict[str, Any]:
    """What the form started from: every field's value of the run that is run again, else of the chosen preset."""
    again: dict[str, Any] | None = st.session_state.get(AGAIN_KEY)
    return again["config"] if again else preset_values(st.session_state["preset"])


def take(values: dict[str, Any]) -> None:
    """Set these fields."""
    for name, value in values.items():
        st.session_state[key_of(name)] = value


def fill_in() -> None:
    """Give each field that has no value yet the one of the chosen preset."""
    st.session_state.setdefault("preset", FIRST_PRESET)
    for name, value in preset_values(st.session_state["preset"]).items():
        st.session_state.setdefault(key_of(name), value)
        # else a field of a page just opened shows its own default where its value came from a press elsewhere
        if st.session_state.get(IS_OPENED_KEY):
            st.session_state[key_of(name)] = st.session_state[key_of(name)]


def take_preset() -> None:
    """Set every field to the chosen preset's value."""
    st.session_state.pop(AGAIN_KEY, None)
    take(preset_values(st.session_state["preset"]))


def take_reference() -> None:
    """Set every field to what the form started from."""
    take(reference_values())


def values() -> dict[str, Any]:
    """The form as it stands, checked by nobody."""
    return {name: st.session_state[key_of(name)] for name in RunConfig.model_fields}


def changed_fields() -> list[str]:
    """The fields that differ from what the form started from."""
    reference = reference_values()
    return [name for name, value in values().items() if value != reference[name]]


def preset_choice() -> None:
    """The presets, with a way back where fields were changed."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.segmented_control(
            "Start from",
            list(PRESETS),
            format_func=PRESET_TITLES.get,
            key="preset",
            required=True,
            on_change=take_preset,
            persist_state="session",
        )
        changed = changed_fields()
        if changed:
            words = f"Reset {len(changed)} changed field{'s' if len(changed) > 1 else ''}"
            st.button(words, icon=":material/undo:", type="tertiary", on_click=take_reference, key="reset_all")


def field(
    name: str,
    problems: dict[str, str],
    *,
    options: list[str] | None = None,
    words: Callable[[str], str] = str,
) -> None:
    """One field's widget; marked and with a way back where it differs from what the form started from.

    Args:
        problems: as `field_errors` gives them; the field's own is written under it.
        options: suggestions for a text field, which makes it a searchable list.
        words: what a suggestion is shown as; another text for each.
    """
    info = RunConfig.model_fields[name]
    preset = reference_values()[name]
    is_changed = st.session_state[key_of(name)] != preset
    label = f"{info.title} :orange[● changed]" if is_changed else str(info.title)
    common: dict[str, Any] = {"key": key_of(name), "help": info.description, "persist_state": "session"}
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        if get_origin(info.annotation) is Literal:
            st.segmented_control(
                label,
                get_args(info.annotation),
                format_func=lambda choice: CHOICE_WORDS.get(choice, choice),
                required=True,
                width="stretch",
                **common,
            )
        elif options is not None:
            known = list(dict.fromkeys([*options, st.session_state[key_of(name)]]))
            st.selectbox(label, known, accept_new_options=True, format_func=words, **common)
        elif info.annotation is str:
            st.text_input(label, placeholder=EMPTY_WORDS[name], **common)
        else:
            _number(name, label, common)
        if is_changed:
            st.button(
                "",
                icon=":material/undo:",
                type="tertiary",
                key=f"reset_{name}",
                help=f"Back to {EMPTY_WORDS[name] if preset in (None, '') else escaped(value_in_words(name, preset))}",
                on_click=_reset,
                args=(name, preset),
            )
    if name in CAN_BE_AUTO:
        _auto_toggle(name)
    if name in problems:
        st.caption(f":red[{info.title}: {escaped(problems[name])}.]")


def section(title: str, problems: dict[str, str]) -> None:
    """A folded part of the form; its label says how many of its fields differ from the preset."""
    rows = SECTIONS[title]
    changed = set(changed_fields()) & {name for row in rows for name in row}
    label = f"{title} :orange[● {len(changed)} changed]" if changed else title
    # with a key it stays open when its label changes
    with st.expander(label, key=f"section_{title}"):
        for row in rows:
            shown = [name for name in row if _is_shown(name)]
            for column, name in zip(st.columns(len(shown)) if shown else (), shown, strict=True):
                with column:
                    field(name, problems)


def _is_shown(name: str) -> bool:
    if name not in SHOWN_WHERE:
        return True
    other, choice = SHOWN_WHERE[name]
    return bool(st.session_state[key_of(other)] == choice)


def _number(name: str, label: str, common: dict[str, Any]) -> None:
    info = RunConfig.model_fields[name]
    kind = float if info.annotation is float else int
    limits: dict[str, Any] = {}
    for limit in info.metadata:
        for edge, side in (("ge", "min_value"), ("gt", "min_value"), ("le", "max_value"), ("lt", "max_value")):
            if getattr(limit, edge, None) is not None:
                limits[side] = kind(getattr(limit, edge))
    shape = {"step": FLOAT_STEPS.get(name, 0.1), "format": "%g"} if kind is float else {"step": 1}
    if type(None) in get_args(info.annotation):
        shape |= {"value": None, "placeholder": EMPTY_WORDS[name]}
    if name in CAN_BE_AUTO:
        shape["disabled"] = not st.session_state[key_of(name)]
    st.number_input(label, **limits, **shape, **common)


def _auto_toggle(name: str) -> None:
    """Whether a number is found before the run, for which 0 stands."""
    st.session_state[f"auto_{name}"] = not st.session_state[key_of(name)]
    st.toggle(CAN_BE_AUTO[name], key=f"auto_{name}", on_change=_take_auto, args=(name,))


def _take_auto(name: str) -> None:
    number = reference_values()[name] or RunConfig.model_fields[name].default
    _reset(name, 0 if st.session_state[f"auto_{name}"] else number)


def _reset(name: str, value: Any) -> None:
    st.session_state[key_of(name)] = value


@st.cache_data(ttl=600, show_spinner="Listing the models …")
def known_models() -> dict[str, dict[str, Any]]:
    """What is known of each model, by name."""
    from core.models.catalogue import list_models

    return {
        model.name: {"params": model.num_params, "image_size": model.default_image_size, "weights": model.weights}
        for model in list_models("")
    }


def _known(name: str, models: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    short = name.removeprefix("timm/").removeprefix("torchvision/")
    return models.get(name) or models.get(short) or models.get(f"timm/{short}")


def model_caption(name: str, models: dict[str, dict[str, Any]]) -> str:
    """Size, image size and where the weights are, in one line."""
    model = _known(name, models)
    if model is None:
        return ":orange[No model of this name is known.]"
    parts = []
    if num_params := model["params"] or _num_params(name):
        parts.append(f"{num_params / 1e6:.1f} M parameters")
    if model["image_size"]:
        parts.append(f"{model['image_size']} px")
    parts.append(WEIGHTS_WORDS.get(model["weights"], model["weights"]))
    return " · ".join(parts)


def epochs_caption(config: RunConfig, models: dict[str, dict[str, Any]]) -> str:
    """ "Then, from epoch 2 on the last stages, 48 px; from epoch 3 on 64 px."; empty where epochs are alike."""
    full = config.image_size or (_known(config.model, models) or {}).get("image_size")
    if not changes_between_epochs(config) or not full:
        return ""
    changes = {epoch: changes_at(config, full, epoch) for epoch in range(2, config.epochs + 1)}
    told = [f"from epoch {epoch} on {stage_in_words(words)}" for epoch, words in changes.items() if words]
    return f"Then, {'; '.join(told)}." if told else ""


@st.cache_data(show_spinner=False)
def _num_params(name: str) -> int | None:
    """Counting means building the model without its weights, so it is done for the chosen one alone."""
    from core.models.catalogue import count_params

    return count_params(name)


def device_cards() -> None:
    """A card a device kind, greyed with the reason where it is not available."""
    from core.devices import list_devices, resolve_kind

    infos = list_devices()
    chosen = st.session_state[key_of("device")]
    with st.container(horizontal=True, gap="small"):
        _card("auto", "Automatic", f"Takes {resolve_kind('auto')} here", True, chosen)
        for info in infos:
            _card(info.kind, info.kind.upper(), device_caption(info), info.available, chosen)


def device_caption(info: DeviceInfo) -> str:
    """Name, number, memory and what is worth knowing of a device kind, or why it is not available."""
    if not info.available:
        return info.reason
    memory = f"{info.memory_gib:.0f} GiB{' each' if info.count > 1 else ''}" if info.memory_gib else ""
    name = f"{info.count} x {info.name}" if info.count > 1 else info.name
    return " · ".join(part for part in (name, memory, info.note) if part)


def _card(kind: str, title: str, words: str, is_available: bool, chosen: str) -> None:
    with st.container(border=True, width=210, gap="small"):
        st.markdown(f"**{title}**" if is_available else f":gray[**{title}**]")
        st.caption(words)
        is_chosen = kind == chosen
        st.button(
            "Chosen" if is_chosen else "Choose" if is_available else "Not available",
            key=f"device_{kind}",
            icon=":material/check_circle:" if is_chosen else None,
            type="primary" if is_chosen else "secondary",
            disabled=not is_available,
            on_click=_reset,
            args=("device", kind),
            width="stretch",
        )


def data_problem(spec: str) -> str:
    """Why the data aren't there or may not be read, seen without reading them; "" where they can be."""
    from core.data.sources import locate

    return problem_of(lambda: services().roots.check_spec(spec)) or problem_of(lambda: locate(spec))


def data_caption(spec: str) -> str:
    """What is worth knowing of well-known data, before they are fetched."""
    from core.data.sources import about

    return about(spec)


def device_problem(config: RunConfig) -> str:
    """Why the config's device can't run it; "" where it can."""
    from core.devices import check_precision, count_sharing, resolve_kind
    from core.devices.ranks import count_processes
    from core.setup import check_batch

    def check() -> None:
        kind = resolve_kind(config.device)
        check_precision(kind, config.precision)
        count = count_processes(kind, config.num_devices)
        check_batch(config, count_sharing(kind, config.num_devices), count)

    return problem_of(check)


def problem_of(check: Callable[[], object]) -> str:
    """The error that a check raises, as a person reads it; "" where it raises none."""
    try:
        check()
    except AppError as error:
        return str(error)
    return ""


def schedule_figure(config: RunConfig) -> go.Figure:
    """The learning rate over the epochs."""
    total = config.epochs * PREVIEW_STEPS_PER_EPOCH
    count = min(total, PREVIEW_POINTS)
    steps = [1 + index * (total - 1) // max(1, count - 1) for index in range(count)]
    rates = [lr_at(config, step, PREVIEW_STEPS_PER_EPOCH) for step in steps]
    epochs = [step / PREVIEW_STEPS_PER_EPOCH for step in steps]
    figure = go.Figure(go.Scatter(x=epochs, y=rates, mode="lines", hovertemplate="epoch %{x:.1f}: %{y:.3g}"))
    figure.update_layout(height=200, margin={"l": 8, "r": 8, "t": 8, "b": 8}, showlegend=False)
    figure.update_xaxes(title="Epoch")
    figure.update_yaxes(title="Learning rate", rangemode="tozero", exponentformat="e")
    return figure


def request_token(config: RunConfig, newest_run: str, made_from: dict[str, Any]) -> str:
    """Equal for presses of Start with equal forms while `newest_run` is the newest one.

    So a double click, or two tabs at once, make one run.

    Args:
        made_from: see `origin.made_from`.
    """
    return hashlib.sha256(f"{config.model_dump_json()}|{newest_run}|{json.dumps(made_from)}".encode()).hexdigest()
