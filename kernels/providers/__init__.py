# SPDX-License-Identifier: Apache-2.0
"""Providers: what may compute a function, and the proof that its bits are the function's.

A provider is an own kernel, named by the digest of its source, or a call into a library, named by the library's version and
the settings its bits depend on. `catalogue` lists both kinds, `certify` compares one with the function's reference as
integers and makes an evidence record of it, or refuses and names elements that differ. A library that gave other bits
before can be in the catalogue too: that it fails is worth knowing, and costs nothing.
"""
