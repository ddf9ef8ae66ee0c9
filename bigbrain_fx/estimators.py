"""The checkout's folder `estimators`; a wheel has the folder here, and not this file."""

from bigbrain_fx.core import alias_package

alias_package(__name__, "estimators")
