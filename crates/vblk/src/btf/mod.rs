//! BTF, the kernel's description of its types, as far as a comparison of two modules needs it.
//!
//! Promises for any bytes: no panic, no endless loop, time and memory in proportion to them;
//! unknown data is an error. Reads split BTF (that of a module continues that of the kernel) in the
//! byte order of this machine. Pure.
//!
//! Own code: the existing crates do not read split BTF, or have licences that cannot be shipped.
//! Source: Documentation/bpf/btf.rst, `include/uapi/linux/btf.h`.

#[cfg(test)]
pub(crate) mod make;
#[cfg(test)]
mod tests;

use std::fmt;

/// Kinds of types.
pub(crate) const INT: u8 = 1;
pub(crate) const PTR: u8 = 2;
pub(crate) const ARRAY: u8 = 3;
pub(crate) const STRUCT: u8 = 4;
pub(crate) const UNION: u8 = 5;
pub(crate) const ENUM: u8 = 6;
pub(crate) const FWD: u8 = 7;
pub(crate) const TYPEDEF: u8 = 8;
pub(crate) const VOLATILE: u8 = 9;
pub(crate) const CONST: u8 = 10;
pub(crate) const RESTRICT: u8 = 11;
pub(crate) const FUNC: u8 = 12;
pub(crate) const FUNC_PROTO: u8 = 13;
pub(crate) const VAR: u8 = 14;
pub(crate) const DATASEC: u8 = 15;
pub(crate) const FLOAT: u8 = 16;
pub(crate) const DECL_TAG: u8 = 17;
pub(crate) const TYPE_TAG: u8 = 18;
pub(crate) const ENUM64: u8 = 19;

/// `BTF_MAGIC`.
const MAGIC: u16 = 0xEB9F;
/// Bytes of the header that every version has.
const HEADER_BYTES: usize = 24;
/// Bytes of a header that tells where the layout section is (Linux 7.3).
const HEADER_LAYOUT_BYTES: usize = 32;
/// Bytes of a type before what depends on its kind.
const TYPE_BYTES: usize = 12;

/// Bytes of a name with its end: `KSYM_NAME_LEN` is the longest that the kernel knows.
const NAME_BYTES: usize = 512;

/// Errors of BTF.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Bad {
    /// It is none, of another byte order or version, or its sections are not inside.
    Header,
    /// A type of a kind whose length is not known.
    Kind(u8),
    /// A type reaches over the end.
    Short,
    /// There is no type of this number.
    Type(u32),
    /// There is no text at this place, or it is not UTF-8.
    Text(u32),
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bad::Header => f.write_str("no BTF of this machine"),
            Bad::Kind(kind) => write!(f, "BTF with a kind {kind} of types that is not known"),
            Bad::Short => f.write_str("BTF with a type that reaches over the end"),
            Bad::Type(id) => write!(f, "BTF without a type {id} that it names"),
            Bad::Text(at) => write!(f, "BTF without a text at {at} that it names"),
        }
    }
}

/// Types of a kernel or module.
#[derive(Debug)]
pub(crate) struct Btf<'a> {
    base: Option<&'a Btf<'a>>,
    types: &'a [u8],
    strings: &'a [u8],
    /// Where types begin in `types`; the first has the number [`Btf::first`].
    offsets: Vec<usize>,
    /// Texts before this offset are those of the base.
    strings_before: u32,
}

/// A type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Type<'a> {
    pub(crate) kind: u8,
    /// `kind_flag`: a structure has bit fields; a forward declaration is of a union.
    pub(crate) flag: bool,
    /// Where its name is; 0: it has none.
    pub(crate) name: u32,
    /// Bytes, or the number of another type: as the kind is.
    pub(crate) word: u32,
    /// What follows.
    rest: &'a [u8],
}

/// A member of a structure or union.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub(crate) name: u32,
    pub(crate) id: u32,
    /// Bits from the start.
    pub(crate) at_bit: u32,
    /// Bits of a bit field; 0: it is none.
    pub(crate) bits: u32,
}

impl<'a> Btf<'a> {
    /// Reads BTF.
    ///
    /// * `base`: of the kernel, where these are the types of a module.
    pub(crate) fn parse(bytes: &'a [u8], base: Option<&'a Btf<'a>>) -> Result<Btf<'a>, Bad> {
        let word = |at: usize| number(bytes, at).ok_or(Bad::Header);
        let magic = bytes.first_chunk().map(|magic| u16::from_ne_bytes(*magic));
        if magic != Some(MAGIC) || bytes.get(2) != Some(&1) {
            return Err(Bad::Header);
        }
        let header_bytes = index(word(4)?);
        if header_bytes < HEADER_BYTES {
            return Err(Bad::Header);
        }
        let section = |at: usize| {
            let start = header_bytes.checked_add(index(word(at)?)).ok_or(Bad::Header)?;
            let end = start.checked_add(index(word(at + 4)?)).ok_or(Bad::Header)?;
            bytes.get(start..end).ok_or(Bad::Header)
        };
        let (types, strings) = (section(8)?, section(16)?);
        let layout = if header_bytes >= HEADER_LAYOUT_BYTES { section(24)? } else { &[] };
        let strings_before = match base {
            Some(base) => u32::try_from(base.strings.len()).map_err(|_| Bad::Header)?,
            None => 0,
        };
        let mut btf = Btf { base, types, strings, offsets: Vec::new(), strings_before };
        let mut at = 0;
        while at < types.len() {
            btf.offsets.push(at);
            at = btf.end_of(at, layout)?;
        }
        Ok(btf)
    }

    /// Where a type ends in the section.
    fn end_of(&self, at: usize, layout: &[u8]) -> Result<usize, Bad> {
        let info = number(self.types, at + 4).ok_or(Bad::Short)?;
        let (kind, count) = (kind_of(info), count_of(info));
        let (once, each) = match kind {
            INT | VAR | DECL_TAG => (4, 0),
            ARRAY => (12, 0),
            STRUCT | UNION | DATASEC | ENUM64 => (0, 12),
            ENUM | FUNC_PROTO => (0, 8),
            PTR | FWD | TYPEDEF | VOLATILE | CONST | RESTRICT | FUNC | FLOAT | TYPE_TAG => (0, 0),
            // A kind of a later kernel, which says how long it is.
            _ => match layout.get(usize::from(kind) * 4..usize::from(kind) * 4 + 2) {
                Some(&[once, each]) => (usize::from(once), usize::from(each)),
                _ => return Err(Bad::Kind(kind)),
            },
        };
        let bytes = count.checked_mul(each).and_then(|all| all.checked_add(TYPE_BYTES + once));
        let end = bytes.and_then(|bytes| at.checked_add(bytes)).ok_or(Bad::Short)?;
        if end > self.types.len() { Err(Bad::Short) } else { Ok(end) }
    }

    /// Number of the first type that is not of the base. 0 is void.
    pub(crate) fn first(&self) -> u32 {
        self.base.map_or(1, Btf::end)
    }

    /// Number after the last type.
    fn end(&self) -> u32 {
        // The offsets are those of types in a section whose length is 32 bits.
        self.first().saturating_add(u32::try_from(self.offsets.len()).unwrap_or(u32::MAX))
    }

    /// A type by its number, which is not 0.
    pub(crate) fn get(&self, id: u32) -> Result<Type<'a>, Bad> {
        let Some(place) = id.checked_sub(self.first()) else {
            return self.base.ok_or(Bad::Type(id))?.get(id);
        };
        let start = *self.offsets.get(index(place)).ok_or(Bad::Type(id))?;
        let end = self.offsets.get(index(place) + 1).copied().unwrap_or(self.types.len());
        let bytes = self.types.get(start..end).ok_or(Bad::Type(id))?;
        let word = |at| number(bytes, at).ok_or(Bad::Type(id));
        let info = word(4)?;
        Ok(Type {
            kind: kind_of(info),
            flag: info >> 31 != 0,
            name: word(0)?,
            word: word(8)?,
            rest: bytes.get(TYPE_BYTES..).ok_or(Bad::Type(id))?,
        })
    }

    /// A text. "" where there is none.
    pub(crate) fn text(&self, at: u32) -> Result<&'a str, Bad> {
        let Some(own) = at.checked_sub(self.strings_before) else {
            return self.base.ok_or(Bad::Text(at))?.text(at);
        };
        let rest = self.strings.get(index(own)..).ok_or(Bad::Text(at))?;
        let rest = &rest[..rest.len().min(NAME_BYTES)];
        let end = rest.iter().position(|byte| *byte == 0).ok_or(Bad::Text(at))?;
        std::str::from_utf8(&rest[..end]).map_err(|_| Bad::Text(at))
    }

    /// The type of this kind and name: of the module, else of its base.
    pub(crate) fn find(&self, kind: u8, name: &str) -> Option<(u32, Type<'a>)> {
        let own = (self.first()..self.end()).find_map(|id| {
            let found = self.get(id).ok()?;
            let is_it = found.kind == kind && self.text(found.name) == Ok(name);
            is_it.then_some((id, found))
        });
        own.or_else(|| self.base?.find(kind, name))
    }
}

impl<'a> Type<'a> {
    /// Members of a structure or union, in order.
    pub(crate) fn members(&self) -> impl Iterator<Item = Member> + use<'a> {
        let has_bit_fields = self.flag;
        self.words::<3>().map(move |[name, id, place]| {
            let (at_bit, bits) =
                if has_bit_fields { (place & 0xff_ffff, place >> 24) } else { (place, 0) };
            Member { name, id, at_bit, bits }
        })
    }

    /// Types of the parameters of a function, in order. 0 at the end: and others.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = u32> + use<'a> {
        self.words::<2>().map(|[_, id]| id)
    }

    /// Type and number of the elements of an array.
    pub(crate) fn elements(&self) -> Option<(u32, u32)> {
        self.words::<3>().next().map(|[id, _, count]| (id, count))
    }

    fn words<const N: usize>(&self) -> impl Iterator<Item = [u32; N]> + use<'a, N> {
        let chunks = self.rest.chunks_exact(N * 4);
        chunks.map(|chunk| std::array::from_fn(|place| number(chunk, place * 4).unwrap_or(0)))
    }
}

fn kind_of(info: u32) -> u8 {
    (info >> 24).to_le_bytes()[0] & 0x7f
}

fn count_of(info: u32) -> usize {
    index(info & 0xff_ffff)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

/// A number of 32 bits as an index: every machine that we run on has them.
fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
