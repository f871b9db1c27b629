//! BTF by hand.
//!
//! Promises: only tests build it; what it makes is well-formed unless the test says otherwise.

use super::{CONST, FUNC, FUNC_PROTO, INT, PTR, STRUCT, TYPE_TAG, UNION};

/// BTF that grows.
#[derive(Clone, Debug)]
pub(crate) struct Maker {
    types: Vec<u8>,
    strings: Vec<u8>,
    next: u32,
    strings_before: u32,
    /// Kind, and bytes of its elements: the layout section.
    pub(crate) layout: Vec<u8>,
}

impl Maker {
    /// That of a kernel.
    pub(crate) fn base() -> Maker {
        Maker { types: vec![], strings: vec![0], next: 1, strings_before: 0, layout: vec![] }
    }

    /// That of a module.
    pub(crate) fn split(base: &Maker) -> Maker {
        let strings_before = base.strings_before + u32::try_from(base.strings.len()).unwrap();
        Maker { types: vec![], strings: vec![], next: base.next, strings_before, layout: vec![] }
    }

    fn text(&mut self, text: &str) -> u32 {
        if text.is_empty() {
            return 0;
        }
        let at = self.strings_before + u32::try_from(self.strings.len()).unwrap();
        self.strings.extend(text.as_bytes());
        self.strings.push(0);
        at
    }

    /// A type; gives its number.
    ///
    /// * `count`: of elements; `rest`: what follows.
    pub(crate) fn add(
        &mut self,
        kind: u8,
        name: &str,
        (flag, count): (bool, u32),
        word: u32,
        rest: &[u32],
    ) -> u32 {
        let name = self.text(name);
        let info = u32::from(flag) << 31 | u32::from(kind) << 24 | count;
        for each in [name, info, word].iter().chain(rest) {
            self.types.extend(each.to_ne_bytes());
        }
        self.next += 1;
        self.next - 1
    }

    pub(crate) fn int(&mut self, name: &str, bytes: u32) -> u32 {
        self.add(INT, name, (false, 0), bytes, &[bytes * 8])
    }

    pub(crate) fn pointer(&mut self, to: u32) -> u32 {
        self.add(PTR, "", (false, 0), to, &[])
    }

    pub(crate) fn constant(&mut self, of: u32) -> u32 {
        self.add(CONST, "", (false, 0), of, &[])
    }

    pub(crate) fn tagged(&mut self, of: u32) -> u32 {
        self.add(TYPE_TAG, "user", (false, 0), of, &[])
    }

    /// * `members`: name, type, bits from the start.
    pub(crate) fn structure(
        &mut self,
        name: &str,
        bytes: u32,
        members: &[(&str, u32, u32)],
    ) -> u32 {
        self.composite(STRUCT, name, bytes, members)
    }

    pub(crate) fn union(&mut self, name: &str, bytes: u32, members: &[(&str, u32, u32)]) -> u32 {
        self.composite(UNION, name, bytes, members)
    }

    fn composite(&mut self, kind: u8, name: &str, bytes: u32, members: &[(&str, u32, u32)]) -> u32 {
        let mut rest = Vec::new();
        for (name, id, at_bit) in members {
            rest.extend([self.text(name), *id, *at_bit]);
        }
        self.add(kind, name, (false, u32::try_from(members.len()).unwrap()), bytes, &rest)
    }

    pub(crate) fn prototype(&mut self, gives: u32, takes: &[u32]) -> u32 {
        let rest: Vec<u32> = takes.iter().flat_map(|id| [0, *id]).collect();
        self.add(FUNC_PROTO, "", (false, u32::try_from(takes.len()).unwrap()), gives, &rest)
    }

    pub(crate) fn function(&mut self, name: &str, prototype: u32) -> u32 {
        self.add(FUNC, name, (false, 1), prototype, &[])
    }

    /// All of it.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let len = |part: &[u8]| u32::try_from(part.len()).unwrap();
        let (types, strings, layout) = (len(&self.types), len(&self.strings), len(&self.layout));
        let mut out = Vec::new();
        out.extend(0xEB9F_u16.to_ne_bytes());
        out.extend([1, 0]);
        for word in [32, 0, types, types, strings, types + strings, layout] {
            out.extend(u32::to_ne_bytes(word));
        }
        [&out[..], &self.types, &self.strings, &self.layout].concat()
    }
}
