"""What all sections of a run file are made from."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME)]


class Strict(BaseModel):
    """Base of all sections: unknown keys are refused, defaults are checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`steps = true` would be one step."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in (int, float):
            raise ValueError("must be a number")
        return value


class Component(BaseModel):
    """Something chosen by `type` (a built-in name, `module:Object`, or an entry point); other keys are its options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: str

    @property
    def options(self) -> dict[str, Any]:
        """The keys beside `type`."""
        return dict(self.__pydantic_extra__ or {})


def component_of(value: Any) -> Any:
    """A component may be given by its bare name."""
    return {"type": value} if isinstance(value, str) else value


def or_none(value: Any) -> Any:
    """A command line cannot leave a table out, so there a text says it."""
    return None if value == "none" else value


Spec = Annotated[Component, BeforeValidator(component_of)]
