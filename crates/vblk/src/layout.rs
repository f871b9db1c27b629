//! Checks that the module was built for the vhost of the running kernel.
//!
//! Promises: a module whose layout differs, or cannot be read, is refused before it is used.
//!
//! The module is built with a copy of vhost's private header, and a kernel without module versions
//! loads one that was built with a wrong copy, which corrupts memory. So vhost's structures, and
//! the functions that the module calls, are compared in the BTF of both before the module is used,
//! as `kernel/vhost-blk/check-layout` does at build time.
//!
//! Control path: reads some MB of /sys, which takes some ms.

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::io::{self, Read};

use crate::btf::{
    ARRAY, Bad, Btf, CONST, ENUM, ENUM64, FLOAT, FUNC, FUNC_PROTO, FWD, INT, PTR, RESTRICT, STRUCT,
    TYPE_TAG, TYPEDEF, Type, UNION, VOLATILE,
};

/// Structures that the module and vhost share.
const STRUCTURES: [&str; 6] =
    ["vhost_dev", "vhost_virtqueue", "vhost_worker", "vhost_poll", "vhost_work", "vhost_iotlb"];
/// The structure of the module whose members have names and types of the functions that it calls.
const CALLS: &str = "vblk_vhost_calls";
/// Where the kernel shows BTF.
const DIRECTORY: &str = "/sys/kernel/btf";
/// Bytes of BTF that are read at most: that of a kernel has 5 to 10 MiB.
const BYTES_MAX: u64 = 64 << 20;
/// Types inside types, and bytes of a description, before it is taken for nonsense. vhost's have 6,
/// and some hundred.
const DEPTH_MAX: u32 = 32;
const TEXT_MAX: usize = 64 << 10;
/// Structures that are compared, in the same way.
const STRUCTURES_MAX: usize = 256;

/// Why a module may not be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// It was built for another vhost: the first difference.
    Differs(String),
    /// It cannot be checked: a file of /sys/kernel/btf, and what is wrong with it.
    Unknown(String),
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayoutError::Differs(what) => write!(
                f,
                "the module vhost_blk was built for another vhost than this kernel's: {what}; \
                 build it for this kernel (make -C \
                 kernel/vhost-blk)"
            ),
            LayoutError::Unknown(why) => write!(
                f,
                "whether the module vhost_blk fits this kernel's vhost cannot be told: {why}; it \
                 needs a kernel and a module with BTF"
            ),
        }
    }
}

impl std::error::Error for LayoutError {}

/// Compares the module that is loaded with the kernel's vhost.
///
/// Errors: they differ; there is no BTF of them.
pub fn check() -> Result<(), LayoutError> {
    let readable = |name| read(name).map_err(|error| unreadable(name, &error));
    // A vhost that is no module is described with the kernel.
    let vhost = match read("vhost") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        other => Some(other.map_err(|error| unreadable("vhost", &error))?),
    };
    compare(&readable("vmlinux")?, vhost.as_deref(), &readable("vhost_blk")?)
}

fn unreadable(name: &str, error: &io::Error) -> LayoutError {
    LayoutError::Unknown(format!("{DIRECTORY}/{name}: {error}"))
}

fn read(name: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(format!("{DIRECTORY}/{name}"))?.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Compares the BTF of two modules about vhost.
///
/// * `base`: BTF of the kernel; `vhost`: of its vhost, when that is a module; `ours`: of vhost_blk.
///
/// Errors: the first difference; BTF that makes no sense.
pub(crate) fn compare(base: &[u8], vhost: Option<&[u8]>, ours: &[u8]) -> Result<(), LayoutError> {
    let bad = |name: &'static str| {
        move |bad: Bad| LayoutError::Unknown(format!("{DIRECTORY}/{name}: {bad}"))
    };
    let base = Btf::parse(base, None).map_err(bad("vmlinux"))?;
    let split = vhost.map(|vhost| Btf::parse(vhost, Some(&base)).map_err(bad("vhost")));
    let split = split.transpose()?;
    let vhost = split.as_ref().unwrap_or(&base);
    let ours = Btf::parse(ours, Some(&base)).map_err(bad("vhost_blk"))?;
    structures(vhost, &ours)?;
    functions(vhost, &ours)
}

/// Compares the structures, and those that are inside them.
fn structures(vhost: &Btf<'_>, ours: &Btf<'_>) -> Result<(), LayoutError> {
    let mut names = STRUCTURES.map(str::to_owned).to_vec();
    let mut next = 0;
    while let Some(name) = names.get(next).cloned() {
        let theirs = Structure::read(vhost, &name, "vhost")?;
        let mine = Structure::read(ours, &name, "vhost_blk")?;
        theirs.compare(&mine)?;
        for inside in theirs.inside {
            if !names.contains(&inside) {
                names.push(inside);
            }
        }
        if names.len() > STRUCTURES_MAX {
            return Err(LayoutError::Unknown("too many structures".to_owned()));
        }
        next += 1;
    }
    Ok(())
}

/// Compares the functions that the module calls with those that vhost has.
fn functions(vhost: &Btf<'_>, ours: &Btf<'_>) -> Result<(), LayoutError> {
    let nonsense = |bad: Bad| LayoutError::Unknown(format!("{DIRECTORY}/vhost_blk: {bad}"));
    let (_, calls) = ours.find(STRUCT, CALLS).ok_or_else(|| {
        LayoutError::Unknown(format!("{DIRECTORY}/vhost_blk: there is no struct {CALLS}"))
    })?;
    let mut any = false;
    for call in calls.members() {
        any = true;
        let name = ours.text(call.name).map_err(nonsense)?;
        let pointer = ours.get(call.id).map_err(nonsense)?;
        let mine = Describe::new(ours).text(pointer.word, 0).map_err(nonsense)?;
        let theirs = match vhost.find(FUNC, name) {
            Some((_, function)) => Describe::new(vhost)
                .text(function.word, 0)
                .map_err(|bad| LayoutError::Unknown(format!("{DIRECTORY}/vhost: {bad}")))?,
            None => return Err(LayoutError::Differs(format!("vhost has no function {name}"))),
        };
        if mine != theirs {
            return Err(LayoutError::Differs(format!(
                "{name} is {theirs} in vhost, {mine} in vhost_blk"
            )));
        }
    }
    match any {
        true => Ok(()),
        false => Err(LayoutError::Unknown(format!("struct {CALLS} is empty"))),
    }
}

/// A structure, as one module knows it.
#[derive(Debug)]
struct Structure {
    name: String,
    bytes: u32,
    /// Name, place, and type.
    members: Vec<(String, String, String)>,
    /// Structures of vhost among its members.
    inside: Vec<String>,
}

impl Structure {
    fn read(btf: &Btf<'_>, name: &str, module: &str) -> Result<Structure, LayoutError> {
        let found = btf.find(STRUCT, name).or_else(|| btf.find(UNION, name));
        let (_, found) =
            found.ok_or_else(|| LayoutError::Differs(format!("{module} has no struct {name}")))?;
        let nonsense = |bad| LayoutError::Unknown(format!("{DIRECTORY}/{module}: {bad}"));
        let mut describe = Describe::new(btf);
        let mut members = Vec::new();
        for member in found.members() {
            let text = btf.text(member.name).map_err(nonsense)?.to_owned();
            let place = match member.bits {
                0 => format!("at bit {}", member.at_bit),
                bits => format!("at bit {}, {bits} bits", member.at_bit),
            };
            let kind = describe.text(member.id, 0).map_err(nonsense)?;
            describe.contain(member.id).map_err(nonsense)?;
            members.push((text, place, kind));
        }
        Ok(Structure { name: name.to_owned(), bytes: found.word, members, inside: describe.inside })
    }

    /// Errors: the first difference.
    fn compare(&self, mine: &Structure) -> Result<(), LayoutError> {
        let name = &self.name;
        let differs = |what| Err(LayoutError::Differs(what));
        for (theirs, ours) in self.members.iter().zip(&mine.members) {
            if theirs != ours {
                let say = |(name, place, kind): &(String, String, String)| match name.as_str() {
                    "" => format!("a member without a name {place} ({kind})"),
                    name => format!("{name} {place} ({kind})"),
                };
                return differs(format!(
                    "struct {name} has {} in vhost and {} in vhost_blk",
                    say(theirs),
                    say(ours)
                ));
            }
        }
        let (theirs, ours) = (self.members.len(), mine.members.len());
        if theirs != ours {
            return differs(format!(
                "struct {name} has {theirs} members in vhost, {ours} in vhost_blk"
            ));
        }
        if self.bytes != mine.bytes {
            let (theirs, ours) = (self.bytes, mine.bytes);
            return differs(format!(
                "struct {name} has {theirs} bytes in vhost, {ours} in vhost_blk"
            ));
        }
        Ok(())
    }
}

/// Describes types as text.
struct Describe<'a> {
    btf: &'a Btf<'a>,
    /// Bytes and types of the description so far.
    said: usize,
    inside: Vec<String>,
}

impl<'a> Describe<'a> {
    fn new(btf: &'a Btf<'a>) -> Describe<'a> {
        Describe { btf, said: 0, inside: Vec::new() }
    }

    /// Describes the type of a declaration. Qualifiers and tags (such as __user) change no call. A
    /// structure without a name is its members.
    fn text(&mut self, id: u32, depth: u32) -> Result<String, Bad> {
        if id == 0 {
            return Ok("void".to_owned());
        }
        if depth > DEPTH_MAX || self.said > TEXT_MAX {
            return Err(Bad::Type(id));
        }
        let found = self.btf.get(id)?;
        let name = self.btf.text(found.name)?;
        let out = match found.kind {
            PTR => format!("{} *", self.text(found.word, depth + 1)?),
            CONST | VOLATILE | RESTRICT | TYPE_TAG => return self.text(found.word, depth + 1),
            ARRAY => {
                let (element, count) = found.elements().ok_or(Bad::Type(id))?;
                format!("{}[{count}]", self.text(element, depth + 1)?)
            }
            FUNC_PROTO => {
                let mut out = format!("{} (", self.text(found.word, depth + 1)?);
                for (number, parameter) in found.parameters().enumerate() {
                    out.push_str(if number > 0 { ", " } else { "" });
                    out.push_str(&self.text(parameter, depth + 1)?);
                }
                out + ")"
            }
            STRUCT | UNION if name.is_empty() => self.members(&found, depth)?,
            STRUCT => format!("struct {name}"),
            UNION => format!("union {name}"),
            FWD => format!("{} {name}", if found.flag { "union" } else { "struct" }),
            ENUM | ENUM64 => format!("enum {name}"),
            INT | FLOAT | TYPEDEF => name.to_owned(),
            _ => return Err(Bad::Type(id)),
        };
        // At least 1, so that nothing repeats without end.
        self.said += out.len() + 1;
        Ok(out)
    }

    fn members(&mut self, found: &Type<'_>, depth: u32) -> Result<String, Bad> {
        let kind = if found.kind == UNION { "union" } else { "struct" };
        let mut out = format!("{kind} of {} bytes {{", found.word);
        for member in found.members() {
            let name = self.btf.text(member.name)?;
            let text = self.text(member.id, depth + 1)?;
            out.push_str(&format!(" {name} at bit {}: {text};", member.at_bit));
            if member.bits > 0 {
                out.push_str(&format!(" {} bits;", member.bits));
            }
            self.contain(member.id)?;
        }
        Ok(out + " }")
    }

    /// Records a structure of vhost inside another one: its members are compared, too. Other
    /// structures are in the kernel's public headers, which both were built with.
    fn contain(&mut self, id: u32) -> Result<(), Bad> {
        let mut id = id;
        for _ in 0..DEPTH_MAX {
            if id == 0 {
                return Ok(());
            }
            let found = self.btf.get(id)?;
            id = match found.kind {
                CONST | VOLATILE | RESTRICT | TYPE_TAG | TYPEDEF => found.word,
                ARRAY => found.elements().ok_or(Bad::Type(id))?.0,
                STRUCT | UNION => {
                    let name = self.btf.text(found.name)?;
                    let is_theirs = name.starts_with("vhost") || name.starts_with("irq_bypass");
                    if is_theirs && !self.inside.iter().any(|other| other == name) {
                        self.inside.push(name.to_owned());
                    }
                    return Ok(());
                }
                _ => return Ok(()),
            };
        }
        Err(Bad::Type(id))
    }
}
