//! The handshake of a client: what both sides agree on, and the export.
//!
//! Promises: bounded in time ([`Timed`]), in the number and the length of the server's replies;
//! sizes and flags of a server are checked before anything is built on them. Blocks: for control
//! threads and threads made for it.
//! Source: the NBD protocol, "Fixed newstyle negotiation".

use ringdisk_nbd_protocol::Malformed;
use ringdisk_nbd_protocol::handshake::{
    EXPORT_BYTES, ExportInfo, GREETING_BYTES, OPTION_REPLY_BYTES, OptionReplyHead, client_flags,
    parse_greeting,
};
use ringdisk_nbd_protocol::numbers::{
    PADDING_BYTES, PAYLOAD_BYTES_MAX, context, export_flags, handshake_flags, info, option,
    option_reply,
};
use ringdisk_nbd_protocol::options::{
    BlockSizes, InfoReply, InfoRequest, MetaContext, MetaRequest, is_error, push_option,
};
use ringdisk_nbd_protocol::request::Style;
use ringdisk_ring::Errno;
use ringdisk_tls::{ClientTls, StreamError};

use super::connect::Timed;

/// Longest data of a reply to an option, bytes: a name, a text, or a context, all of at most 4096
/// bytes, with their numbers.
const REPLY_BYTES_MAX: u32 = 8192;
/// Most replies to one option; three kinds of information and some that are not known here.
const REPLIES_MAX: usize = 64;
/// Largest block that requests are aligned to, bytes.
const BLOCK_BYTES_MAX: u32 = 64 << 10;
/// Largest size of an export, bytes: offsets of files are signed.
const SIZE_MAX: u64 = i64::MAX as u64;
/// Shortest payload that a server must take at once, bytes.
const PAYLOAD_BYTES_MIN: u32 = 64 << 10;

/// What client and server agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Agreed {
    pub(super) style: Style,
    /// Size of the export, bytes: a multiple of the smallest block.
    pub(super) size: u64,
    /// [`export_flags`].
    pub(super) flags: u16,
    /// Alignment of requests, bytes: a power of two.
    pub(super) block: u32,
    /// Alignment that is fastest, bytes: a power of two.
    pub(super) preferred: u32,
    /// Longest payload, bytes: a multiple of `block`.
    pub(super) payload_max: u32,
    /// Number of the context `base:allocation`, if there is one and no bitmap was asked for.
    pub(super) allocation: Option<u32>,
    /// Number of the context of the bitmap that was asked for.
    pub(super) bitmap: Option<u32>,
}

impl Agreed {
    /// Number of the one context that block status is about.
    pub(super) fn context(&self) -> Option<u32> {
        self.bitmap.or(self.allocation)
    }

    /// Whether the export has all of these [`export_flags`].
    pub(super) fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }
}

/// Why there was no agreement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The connection failed.
    Broken(Errno),
    /// The server breaks the protocol.
    Malformed(&'static str),
    /// The server does not have the export; with its words.
    Unknown(String),
    /// The server does not have the bitmap, whose context this is.
    NoBitmap(String),
    /// The server does not let this client in; with its words.
    Refused(String),
    /// The connection cannot be encrypted, or either side does not trust the other.
    Tls(String),
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Refusal {
        Refusal::Broken(errno)
    }
}

impl From<StreamError> for Refusal {
    fn from(error: StreamError) -> Refusal {
        match error {
            StreamError::Socket(errno) => Refusal::Broken(errno),
            StreamError::Ended | StreamError::Tls(_) => Refusal::Tls(error.to_string()),
        }
    }
}

impl From<Malformed> for Refusal {
    fn from(malformed: Malformed) -> Refusal {
        Refusal::Malformed(malformed.0)
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::Broken(Errno::TIMEDOUT) => f.write_str(
                "the server does not answer in time (it may serve as many clients as \
                             it takes already)",
            ),
            Refusal::Broken(Errno::CONNRESET) => f.write_str("the server ended the connection"),
            Refusal::Broken(errno) => errno.fmt(f),
            Refusal::Malformed(why) => write!(f, "the server breaks the protocol: {why}"),
            Refusal::Unknown(words) => write!(f, "the server has no such export: {words}"),
            Refusal::NoBitmap(name) => {
                let name = name.escape_debug();
                write!(f, "the server does not offer '{name}' of this export")
            }
            Refusal::Refused(words) => write!(f, "the server refuses: {words}"),
            Refusal::Tls(why) => f.write_str(why),
        }
    }
}

/// The words of a server for a terminal: what cannot be printed is escaped, quotes are not.
fn printable(words: &str) -> String {
    let mut out = String::new();
    for c in words.chars() {
        match c {
            '\'' | '"' => out.push(c),
            _ => out.extend(c.escape_debug()),
        }
    }
    out
}

/// An error reply to an option.
struct Denied {
    kind: u32,
    words: String,
}

impl Denied {
    fn into_refusal(self) -> Refusal {
        match self.kind {
            option_reply::UNKNOWN => Refusal::Unknown(self.words),
            option_reply::TLS_REQUIRED => Refusal::Refused(format!(
                "{}: use `nbds://…?tls-certificates=DIR` in place of `nbd://…`",
                self.words
            )),
            _ => Refusal::Refused(self.words),
        }
    }
}

/// Agrees with the server on an export.
///
/// * `bitmap`: the context that block status is to be about, in place of `base:allocation`.
/// * `tls`: the connection is encrypted before anything else is said.
///
/// Errors: [`Refusal`].
pub(super) fn agree(
    timed: &mut Timed,
    export: &[u8],
    bitmap: Option<&str>,
    tls: Option<&ClientTls>,
) -> Result<Agreed, Refusal> {
    let mut greeting = [0; GREETING_BYTES];
    timed.read(&mut greeting)?;
    let offered = parse_greeting(&greeting)?;
    if offered & handshake_flags::FIXED_NEWSTYLE == 0 {
        return Err(Refusal::Malformed("it speaks an old style of NBD"));
    }
    let flags = offered & (handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES);
    timed.write(&client_flags(flags))?;
    if let Some(tls) = tls {
        match ask(timed, option::STARTTLS, &[], |_, _| Ok(()))? {
            Ok(()) => timed.encrypt(tls)?,
            Err(denied) => {
                let words = denied.words;
                return Err(Refusal::Tls(format!(
                    "the server does not encrypt, which the address asks for (`nbds`): {words}"
                )));
            }
        }
    }
    let timed = &*timed;
    let style = style(timed)?;
    let mut number = None;
    if style != Style::Simple {
        number = set_context(timed, export, bitmap.unwrap_or(context::ALLOCATION))?;
    }
    let mut data = Vec::new();
    InfoRequest { name: export, wanted: vec![info::BLOCK_SIZE] }.push(&mut data);
    let mut found = (None, None);
    let gone = ask(timed, option::GO, &data, |kind, data| {
        if kind == option_reply::INFO {
            match InfoReply::parse(data)? {
                InfoReply::Export(export) => found.0 = Some(export),
                InfoReply::BlockSizes(sizes) => found.1 = Some(sizes),
                _ => {}
            }
        }
        Ok(())
    })?;
    let (export, sizes) = match (gone, found) {
        (Ok(()), (Some(export), sizes)) => (export, sizes),
        (Ok(()), (None, _)) => {
            return Err(Refusal::Malformed("the size of the export is missing"));
        }
        (Err(Denied { kind: option_reply::UNSUPPORTED, .. }), _) => {
            let has_zeroes = flags & handshake_flags::NO_ZEROES == 0;
            (by_name(timed, export, has_zeroes)?, None)
        }
        (Err(denied), _) => return Err(denied.into_refusal()),
    };
    // After the export: one that is not there is told first.
    let agreed = checked(style, export, sizes)?;
    match bitmap {
        None => Ok(Agreed { allocation: number, ..agreed }),
        Some(name) if number.is_none() => Err(Refusal::NoBitmap(name.to_owned())),
        Some(_) => Ok(Agreed { bitmap: number, ..agreed }),
    }
}

/// Agrees on the style of replies: the newest that the server has.
fn style(timed: &Timed) -> Result<Style, Refusal> {
    for (option, style) in
        [(option::EXTENDED_HEADERS, Style::Extended), (option::STRUCTURED_REPLY, Style::Structured)]
    {
        match ask(timed, option, &[], |_, _| Ok(()))? {
            Ok(()) => return Ok(style),
            Err(denied) if denied.kind == option_reply::TLS_REQUIRED => {
                return Err(denied.into_refusal());
            }
            Err(_) => {}
        }
    }
    Ok(Style::Simple)
}

/// Chooses a context. Gives its number; `None`: the server has none.
fn set_context(timed: &Timed, export: &[u8], name: &str) -> Result<Option<u32>, Refusal> {
    let mut data = Vec::new();
    let queries = vec![name.as_bytes()];
    MetaRequest { export, queries }.push(&mut data);
    let mut id = None;
    let set = ask(timed, option::SET_META_CONTEXT, &data, |kind, data| {
        if kind == option_reply::META_CONTEXT {
            let context = MetaContext::parse(data)?;
            if context.name != name.as_bytes() || id.is_some() {
                return Err(Malformed("a context that was not asked for"));
            }
            id = Some(context.id);
        }
        Ok(())
    })?;
    Ok(id.filter(|_| set.is_ok()))
}

/// Sends an option and takes its replies, up to the last one.
///
/// * `each`: gets kind and data of each reply before that.
fn ask(
    timed: &Timed,
    option: u32,
    data: &[u8],
    mut each: impl FnMut(u32, &[u8]) -> Result<(), Malformed>,
) -> Result<Result<(), Denied>, Refusal> {
    let mut out = Vec::new();
    push_option(&mut out, option, data);
    timed.write(&out)?;
    for _ in 0..REPLIES_MAX {
        let mut head = [0; OPTION_REPLY_BYTES];
        timed.read(&mut head)?;
        let head = OptionReplyHead::parse(&head)?;
        if head.option != option {
            return Err(Refusal::Malformed("a reply to an option that was not sent"));
        }
        if head.len > REPLY_BYTES_MAX {
            return Err(Refusal::Malformed("a reply to an option is too long"));
        }
        let mut data = vec![0; usize::try_from(head.len).unwrap_or(0)];
        timed.read(&mut data)?;
        if head.kind == option_reply::ACK {
            return Ok(Ok(()));
        }
        if is_error(head.kind) {
            let text = String::from_utf8_lossy(&data);
            let words = match text.trim() {
                "" => format!("error {}", head.kind & !option_reply::ERROR_BIT),
                words => printable(words),
            };
            return Ok(Err(Denied { kind: head.kind, words }));
        }
        each(head.kind, &data)?;
    }
    Err(Refusal::Malformed("endless replies to an option"))
}

/// Enters transmission by the old option.
fn by_name(timed: &Timed, export: &[u8], has_zeroes: bool) -> Result<ExportInfo, Refusal> {
    let mut out = Vec::new();
    push_option(&mut out, option::EXPORT_NAME, export);
    timed.write(&out)?;
    let mut reply = [0; EXPORT_BYTES];
    timed.read(&mut reply).map_err(|error| match error {
        // All that the old option can say.
        StreamError::Socket(Errno::CONNRESET) => {
            Refusal::Unknown(String::from("it ended the connection"))
        }
        error => error.into(),
    })?;
    if has_zeroes {
        timed.read(&mut [0; PADDING_BYTES])?;
    }
    Ok(ExportInfo::parse(&reply)?)
}

fn checked(style: Style, export: ExportInfo, sizes: Option<BlockSizes>) -> Result<Agreed, Refusal> {
    if export.flags & export_flags::HAS_FLAGS == 0 {
        return Err(Refusal::Malformed("the flags of the export are missing"));
    }
    if export.size > SIZE_MAX {
        return Err(Refusal::Malformed("the size of the export is larger than any file"));
    }
    // A server that says nothing takes any request up to the usual limits.
    let none = BlockSizes { minimum: 1, preferred: 4096, maximum: PAYLOAD_BYTES_MAX };
    let BlockSizes { minimum, preferred, maximum } = sizes.unwrap_or(none);
    let is_block = |size: u32| size.is_power_of_two() && size <= BLOCK_BYTES_MAX;
    if !is_block(minimum) {
        return Err(Refusal::Malformed("the smallest block is no power of two up to 64 KiB"));
    }
    if maximum < minimum.max(PAYLOAD_BYTES_MIN) && u64::from(maximum) < export.size {
        return Err(Refusal::Malformed("the longest request is shorter than 64 KiB"));
    }
    let size = export.size - export.size % u64::from(minimum);
    // At least one block, also of an export that is smaller than its block.
    let payload_max = maximum.min(PAYLOAD_BYTES_MAX) / minimum * minimum;
    Ok(Agreed {
        style,
        size,
        flags: export.flags,
        block: minimum,
        preferred: if is_block(preferred) { preferred.max(minimum) } else { minimum.max(4096) },
        payload_max: payload_max.max(minimum),
        allocation: None,
        bitmap: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agree_on(size: u64, flags: u16, sizes: Option<(u32, u32, u32)>) -> Result<Agreed, Refusal> {
        let sizes =
            sizes.map(|(minimum, preferred, maximum)| BlockSizes { minimum, preferred, maximum });
        checked(Style::Structured, ExportInfo { size, flags }, sizes)
    }

    #[test]
    fn sizes_of_a_server_are_checked() {
        let plain = agree_on(1 << 20, 1, None).expect("fine");
        assert_eq!((plain.block, plain.preferred, plain.payload_max), (1, 4096, 32 << 20));
        let odd = agree_on(4097, 1, Some((512, 4096, u32::MAX))).expect("cut to blocks");
        assert_eq!((odd.size, odd.block, odd.payload_max), (4096, 512, 32 << 20));
        let small = agree_on(100, 1, Some((1, 4096, 100))).expect("as long as the export");
        assert_eq!(small.payload_max, 100);
        for (size, flags, sizes) in [
            (1 << 63, 1, None),
            (u64::MAX, 1, None),
            (4096, 0, None),
            (4096, 1, Some((0, 4096, 1 << 20))),
            (4096, 1, Some((3, 4096, 1 << 20))),
            (1 << 20, 1, Some((1 << 17, 1 << 17, 1 << 20))),
            (1 << 20, 1, Some((1, 4096, 0))),
        ] {
            assert!(matches!(agree_on(size, flags, sizes), Err(Refusal::Malformed(_))));
        }
    }
}
