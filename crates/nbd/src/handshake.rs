//! The handshake, from the greeting to what both sides agreed on.
//!
//! Promises: an option of any content gets an answer or ends the connection; what is kept of
//! options is bounded. Texts of errors are those of qemu-nbd, which scripts look for. Allocates:
//! once for each option.

use std::rc::Rc;
use std::sync::Arc;

use ringdisk_nbd_protocol::handshake::{ExportInfo, OptionHead, greeting, parse_client_flags};
use ringdisk_nbd_protocol::numbers::{
    PAYLOAD_BYTES_MAX, handshake_flags, info, option, option_reply as reply,
};
use ringdisk_nbd_protocol::options::{
    BlockSizes, InfoReply, InfoRequest, ListedExport, MetaContext, MetaRequest, parse_export_name,
    push_reply,
};
use ringdisk_nbd_protocol::request::Style;

use crate::end_reason::{End, within_a_message};
use crate::exported_disk::Exported;
use crate::input_buffer::Input;
use crate::negotiated::Agreed;
use crate::queue::Queue;
use crate::transport::Transport;

/// Longest data of an option that is looked at, bytes: some names of 4096 bytes each.
const OPTION_BYTES_MAX: u32 = 64 << 10;
/// Longest data of an option that is skipped, bytes; a longer one ends the connection.
const SKIPPED_BYTES_MAX: u32 = 32 << 20;

/// What options have set so far.
struct Handshake<'a> {
    queue: &'a Queue,
    style: Style,
    /// Of `SET_META_CONTEXT`, with the export that it named.
    contexts: Option<(Arc<Exported>, Vec<usize>)>,
    /// No zeroes follow the reply to `EXPORT_NAME`.
    no_zeroes: bool,
    /// Nothing but STARTTLS is answered: the client has to encrypt first.
    needs_tls: bool,
    is_encrypted: bool,
    /// Replies that were not sent yet.
    out: Vec<u8>,
}

/// What comes after an option.
enum Next {
    Option,
    /// The client shakes hands by TLS, and begins again.
    Tls,
    Transmission(Arc<Exported>),
    Ended,
}

/// An error reply: its kind and its text.
type Refusal = (u32, String);

/// Speaks with a client until transmission can begin. Gives what was agreed on, and the reply that
/// begins the transmission phase. `None`: the client has ended the handshake.
pub(crate) async fn handshake(
    queue: &Rc<Queue>,
    transport: &Transport,
    input: &mut Input,
) -> Result<Option<(Agreed, Vec<u8>)>, End> {
    let flags = handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES;
    transport.send(&greeting(flags)).await?;
    let client = parse_client_flags(input.take().await?)?;
    let no_zeroes = client & handshake_flags::NO_ZEROES != 0;
    let is_fixed = client & handshake_flags::FIXED_NEWSTYLE != 0;
    let tls = queue.shared.tls.as_ref();
    let mut state = Handshake {
        queue,
        style: Style::Simple,
        contexts: None,
        no_zeroes,
        needs_tls: tls.is_some_and(|tls| tls.required),
        is_encrypted: false,
        out: Vec::new(),
    };
    loop {
        let head = OptionHead::parse(&input.take().await?)?;
        if !is_fixed && head.option != option::EXPORT_NAME {
            return Err(End::Protocol("an option of the fixed handshake, which it did not choose"));
        }
        let next = if head.len > SKIPPED_BYTES_MAX {
            return Err(End::Protocol("an option of more than 32 MiB"));
        } else if head.len > OPTION_BYTES_MAX {
            input.discard(head.len.into()).await?;
            if head.option == option::EXPORT_NAME {
                return Err(End::Protocol("the name of an export is too long"));
            }
            state.error(head.option, reply::TOO_BIG, "option is too long");
            Next::Option
        } else {
            let mut data = vec![0; head.len as usize];
            input.fill(data.len()).await.map_err(within_a_message)?;
            input.peek(&mut data);
            input.skip(data.len());
            state.take(head.option, &data)?
        };
        if matches!(next, Next::Tls) && input.len() > 0 {
            // A third party may have put them there: they are not the client's words.
            return Err(End::Protocol("bytes behind STARTTLS that are not encrypted"));
        }
        let out = std::mem::take(&mut state.out);
        if let Next::Transmission(export) = next {
            return Ok(Some((state.agree(export), out)));
        }
        transport.send(&out).await?;
        match next {
            Next::Option => {}
            Next::Tls => {
                if let Some(tls) = tls {
                    transport.encrypt(&tls.server).await?;
                }
                state.begin_again();
            }
            Next::Ended | Next::Transmission(_) => return Ok(None),
        }
    }
}

impl Handshake<'_> {
    fn agree(self, export: Arc<Exported>) -> Agreed {
        let chosen = self.contexts.filter(|(named, _)| Arc::ptr_eq(named, &export));
        let contexts = chosen.map_or_else(Vec::new, |(_, contexts)| contexts);
        Agreed { export, style: self.style, contexts }
    }

    /// The connection is encrypted now: what was said before counts no more.
    fn begin_again(&mut self) {
        (self.style, self.contexts) = (Style::Simple, None);
        (self.needs_tls, self.is_encrypted) = (false, true);
    }

    /// Answers one option.
    ///
    /// Errors: `EXPORT_NAME` cannot be answered with an error.
    fn take(&mut self, option: u32, data: &[u8]) -> Result<Next, End> {
        if self.needs_tls && option != option::STARTTLS {
            return self.refuse_plain(option);
        }
        let answered = match option {
            option::EXPORT_NAME => return self.export_name(data),
            option::ABORT => {
                self.reply(option, reply::ACK, &[]);
                return Ok(Next::Ended);
            }
            option::LIST => self.list(data),
            option::STARTTLS => match self.start_tls(data) {
                Ok(()) => return Ok(Next::Tls),
                refused => refused,
            },
            option::STRUCTURED_REPLY => self.structured_reply(data),
            option::EXTENDED_HEADERS => self.extended_headers(data),
            option::INFO | option::GO => match self.info(option, data) {
                Ok(Some(export)) => return Ok(Next::Transmission(export)),
                answered => answered.map(|_| ()),
            },
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.meta(option, data),
            _ => {
                let text = format!("Unsupported option {option} (<unknown>)");
                Err((reply::UNSUPPORTED, text))
            }
        };
        if let Err((kind, text)) = answered {
            self.error(option, kind, &text);
        }
        Ok(Next::Option)
    }

    /// An option that is taken over an encrypted connection only. ABORT ends the connection all the
    /// same.
    fn refuse_plain(&mut self, option: u32) -> Result<Next, End> {
        if option == option::EXPORT_NAME {
            return Err(End::Protocol("it does not encrypt, which is required"));
        }
        let text = format!("Option {option:#x} not permitted before TLS");
        self.error(option, reply::TLS_REQUIRED, &text);
        Ok(if option == option::ABORT { Next::Ended } else { Next::Option })
    }

    fn start_tls(&mut self, data: &[u8]) -> Result<(), Refusal> {
        nothing("starttls", data)?;
        if self.queue.shared.tls.is_none() {
            return Err((reply::POLICY, String::from("TLS not configured")));
        }
        if self.is_encrypted {
            return Err((reply::INVALID, String::from("TLS already enabled")));
        }
        self.reply(option::STARTTLS, reply::ACK, &[]);
        Ok(())
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) {
        push_reply(&mut self.out, option, kind, data);
    }

    fn error(&mut self, option: u32, kind: u32, text: &str) {
        self.reply(option, kind, text.as_bytes());
    }

    /// The export with this name.
    fn find(&self, name: &[u8]) -> Result<Arc<Exported>, Refusal> {
        let found = self.queue.shared.exports.find(name);
        found.ok_or_else(|| {
            let name = String::from_utf8_lossy(name);
            // A text of an error has 4096 bytes at most.
            let name: String = name.chars().take(1000).collect();
            (reply::UNKNOWN, format!("export '{name}' not present"))
        })
    }

    /// * `option`: the one that asks. A client that only asks may still choose contexts.
    fn export_info(&self, export: &Arc<Exported>, option: u32) -> ExportInfo {
        let chosen = self.contexts.as_ref();
        let has_contexts = option == option::INFO
            || chosen.is_some_and(|(named, ids)| Arc::ptr_eq(named, export) && !ids.is_empty());
        let flags = export.flags(self.style, has_contexts);
        ExportInfo { size: export.disk.size().0, flags }
    }

    fn export_name(&mut self, data: &[u8]) -> Result<Next, End> {
        if self.style == Style::Extended {
            return Err(End::Protocol("EXPORT_NAME after extended headers"));
        }
        let name = parse_export_name(data)?;
        let found = self.find(name);
        let export = found.map_err(|_| End::Protocol("it asks for an export that is not there"))?;
        let info = self.export_info(&export, option::EXPORT_NAME);
        info.push_export_name_reply(!self.no_zeroes, &mut self.out);
        Ok(Next::Transmission(export))
    }

    fn list(&mut self, data: &[u8]) -> Result<(), Refusal> {
        nothing("list", data)?;
        let mut all = Vec::new();
        for export in self.queue.shared.exports.all() {
            let (name, description) = (export.name.as_bytes(), export.description.as_bytes());
            let mut data = Vec::new();
            ListedExport { name, description }.push(&mut data);
            push_reply(&mut all, option::LIST, reply::SERVER, &data);
        }
        self.out.append(&mut all);
        self.reply(option::LIST, reply::ACK, &[]);
        Ok(())
    }

    fn structured_reply(&mut self, data: &[u8]) -> Result<(), Refusal> {
        nothing("structured reply", data)?;
        match self.style {
            Style::Simple => self.style = Style::Structured,
            Style::Structured => {
                let text = String::from("structured reply already negotiated");
                return Err((reply::INVALID, text));
            }
            Style::Extended => {
                let text = String::from("extended headers already negotiated");
                return Err((reply::EXTENDED_HEADERS_REQUIRED, text));
            }
        }
        self.reply(option::STRUCTURED_REPLY, reply::ACK, &[]);
        Ok(())
    }

    fn extended_headers(&mut self, data: &[u8]) -> Result<(), Refusal> {
        nothing("extended headers", data)?;
        if self.style == Style::Extended {
            let text = String::from("extended headers already negotiated");
            return Err((reply::INVALID, text));
        }
        self.style = Style::Extended;
        self.reply(option::EXTENDED_HEADERS, reply::ACK, &[]);
        Ok(())
    }

    /// `INFO` and `GO`. Gives the export whose transmission begins.
    fn info(&mut self, option: u32, data: &[u8]) -> Result<Option<Arc<Exported>>, Refusal> {
        let request = InfoRequest::parse(data).map_err(invalid)?;
        let export = self.find(request.name)?;
        let wants = |kind: u16| request.wanted.contains(&kind);
        let mut infos = Vec::new();
        if wants(info::NAME) {
            infos.push(InfoReply::Name(export.name.as_bytes()));
        }
        if wants(info::DESCRIPTION) && !export.description.is_empty() {
            infos.push(InfoReply::Description(export.description.as_bytes()));
        }
        infos.push(InfoReply::BlockSizes(BlockSizes {
            minimum: 1,
            preferred: export.preferred_block,
            maximum: PAYLOAD_BYTES_MAX,
        }));
        infos.push(InfoReply::Export(self.export_info(&export, option)));
        for info in infos {
            let mut data = Vec::new();
            info.push(&mut data);
            self.reply(option, reply::INFO, &data);
        }
        self.reply(option, reply::ACK, &[]);
        Ok((option == option::GO).then_some(export))
    }

    /// `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
    fn meta(&mut self, option: u32, data: &[u8]) -> Result<(), Refusal> {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            // Also when it fails.
            self.contexts = None;
        }
        if sets && self.style == Style::Simple {
            let text = "request option 'set meta context' when structured reply is not negotiated";
            return Err((reply::INVALID, String::from(text)));
        }
        let request = MetaRequest::parse(data).map_err(invalid)?;
        let export = self.find(request.export)?;
        let mut chosen = Vec::new();
        for query in &request.queries {
            // To choose takes the whole name; a part of it is for lists.
            if !(sets && query.ends_with(b":")) {
                chosen.extend(export.contexts_like(query));
            }
        }
        if !sets && request.queries.is_empty() {
            chosen.extend(0..export.contexts.len());
        }
        chosen.sort_unstable();
        chosen.dedup();
        for (id, context) in chosen.iter().enumerate() {
            let id = if sets { u32::try_from(id).unwrap_or(u32::MAX) } else { 0 };
            let name = export.contexts[*context].name();
            let mut data = Vec::new();
            MetaContext { id, name: name.as_bytes() }.push(&mut data);
            self.reply(option, reply::META_CONTEXT, &data);
        }
        self.reply(option, reply::ACK, &[]);
        if sets {
            self.contexts = Some((export, chosen));
        }
        Ok(())
    }
}

/// Options without data.
fn nothing(option: &str, data: &[u8]) -> Result<(), Refusal> {
    if data.is_empty() {
        return Ok(());
    }
    Err((reply::INVALID, format!("option '{option}' has unexpected length")))
}

fn invalid(malformed: ringdisk_nbd_protocol::Malformed) -> Refusal {
    (reply::INVALID, String::from(malformed.0))
}
