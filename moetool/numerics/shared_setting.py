"""A setting of the whole process that several threads want otherwise for a while."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

SettingT = TypeVar("SettingT")


@dataclass(eq=False)
class SharedSetting(Generic[SettingT]):
    """One value per process: the first of several concurrent users changes it, the last restores what was there before,
    also after an exception.

    Attributes:
        get, put: the setting.
    """

    get: Callable[[], SettingT]
    put: Callable[[SettingT], object]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _before: list[SettingT] = field(default_factory=list, init=False)
    _users: int = field(default=0, init=False)

    @contextmanager
    def held_at(self, value: SettingT) -> Iterator[None]:
        """Context manager in which the setting has `value`, in all threads; concurrent users must ask for the same
        value."""
        with self._lock:
            if self._users == 0:
                self._before = [self.get()]
                self.put(value)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self.put(self._before.pop())
