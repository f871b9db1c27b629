//! `qemu-nbd --list`: what a server exports.
//!
//! Promises: control characters in texts of the server are escaped; else those of [`Server`].

use std::io::{self, Read, Write};

use ringdisk_daemon::failure::words;
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_nbd_protocol::handshake::ExportInfo;
use ringdisk_nbd_protocol::numbers::{export_flags as flags, option};
use ringdisk_nbd_protocol::options::{
    BlockSizes, ListedExport, MetaContext, MetaRequest, push_option,
};
use ringdisk_qemu_nbd::{Endpoint, List, Listen, tls};
use ringdisk_tls::{ClientTls, Source, TlsStream};

use crate::server::{Answer, Server, Stream, tcp, unix};

/// Prints what a server exports.
///
/// Errors: it cannot be reached, or does not speak NBD.
pub fn list(asked: &List) -> Result<(), String> {
    let tls = certificates(asked)?;
    let boxed = |stream| Box::new(stream) as Box<dyn Stream>;
    let (shown, stream) = match &asked.server {
        Listen::Unix(path) => (path.display().to_string(), unix(path).map(boxed)),
        Listen::Tcp(address) => {
            let shown = address.to_string();
            let stream = tcp(&shown).map(|stream| Box::new(stream) as Box<dyn Stream>);
            (shown, stream)
        }
    };
    let stream =
        stream.map_err(|error| format!("Failed to connect to '{shown}': {}", words(&error)))?;
    let mut server = Server(Some(stream));
    server
        .list(tls.as_ref())
        .map_err(|error| format!("Failed to list exports of '{shown}': {error}"))
}

/// The certificates that the words name.
///
/// Errors: the text for people.
fn certificates(asked: &List) -> Result<Option<ClientTls>, String> {
    let Some(meant) = tls(&asked.tls, Endpoint::Client)? else { return Ok(None) };
    let host = match (&asked.tls.hostname, &asked.server) {
        (Some(name), _) => name.as_str(),
        (None, Listen::Tcp(address)) => address.host.as_str(),
        (None, Listen::Unix(_)) => "localhost",
    };
    let opened = ClientTls::open(&Source::Directory(meant.directory), host);
    opened.map(Some).map_err(|error| error.to_string())
}

/// A connection that is encrypted.
struct Encrypted {
    tls: TlsStream,
    stream: Box<dyn Stream>,
}

impl Read for Encrypted {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.tls.blocking(&mut self.stream).read(to)
    }
}

impl Write for Encrypted {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.tls.blocking(&mut self.stream).write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl Stream for Encrypted {}

impl Server<Box<dyn Stream>> {
    fn list(&mut self, tls: Option<&ClientTls>) -> Result<(), String> {
        self.greet()?;
        if let Some(tls) = tls {
            self.encrypt(tls)?;
        }
        let (_, is_extended) = self.ask(option::EXTENDED_HEADERS, &[])?;
        let is_structured = is_extended || self.ask(option::STRUCTURED_REPLY, &[])?.1;
        let (answers, is_known) = self.ask(option::LIST, &[])?;
        if !is_known {
            return Err(answers.first().map_or_else(
                || String::from("the server refuses to list them"),
                |(_, text)| visible(&String::from_utf8_lossy(text)),
            ));
        }
        terminal::say(format_args!("exports available: {}", answers.len()));
        for (_, answer) in &answers {
            let listed = ListedExport::parse(answer).map_err(|error| error.to_string())?;
            self.print_export(&listed, is_extended, is_structured)?;
        }
        // It may close without an answer.
        let mut out = Vec::new();
        push_option(&mut out, option::ABORT, &[]);
        let _ = self.send(&out);
        Ok(())
    }

    /// Encrypts all from now on.
    fn encrypt(&mut self, tls: &ClientTls) -> Result<(), String> {
        let (answers, is_taken) = self.ask(option::STARTTLS, &[])?;
        if !is_taken {
            let text = answers.first().map_or(&b""[..], |(_, text)| text);
            let text = visible(&String::from_utf8_lossy(text)).to_string();
            return Err(format!("the server does not encrypt: {text}"));
        }
        if let Some(mut stream) = self.0.take() {
            let tls = tls.connect(&mut stream).map_err(|error| error.to_string())?;
            self.0 = Some(Box::new(Encrypted { tls, stream }));
        }
        Ok(())
    }

    /// Prints one export.
    fn print_export(
        &mut self,
        listed: &ListedExport<'_>,
        is_extended: bool,
        is_structured: bool,
    ) -> Result<(), String> {
        let text = |bytes: &[u8]| visible(&String::from_utf8_lossy(bytes));
        terminal::say(format_args!(" export: '{}'", text(listed.name)));
        if !listed.description.is_empty() {
            terminal::say(format_args!("  description: {}", text(listed.description)));
        }
        let known = self.export(option::INFO, listed.name)?;
        if let Some(ExportInfo { size, flags }) = known.export {
            terminal::say(format_args!("  size:  {size}"));
            terminal::say(format_args!("  flags: {flags:#x} ( {})", names_of(flags)));
        }
        if let Some(BlockSizes { minimum, preferred, maximum }) = known.blocks {
            terminal::say(format_args!("  min block: {minimum}"));
            terminal::say(format_args!("  opt block: {preferred}"));
            terminal::say(format_args!("  max block: {maximum}"));
        }
        if is_structured {
            let bits = if is_extended { 64 } else { 32 };
            terminal::say(format_args!("  transaction size: {bits}-bit"));
            let contexts = self.contexts(listed.name)?;
            terminal::say(format_args!("  available meta contexts: {}", contexts.len()));
            for context in contexts {
                terminal::say(format_args!("   {}", text(&context)));
            }
        }
        Ok(())
    }

    fn contexts(&mut self, name: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let mut data = Vec::new();
        MetaRequest { export: name, queries: Vec::new() }.push(&mut data);
        let (answers, is_known) = self.ask(option::LIST_META_CONTEXT, &data)?;
        let answers = answers.iter().filter(|_| is_known);
        let name = |(_, answer): &Answer| MetaContext::parse(answer).map(|c| c.name.to_vec());
        answers.map(name).collect::<Result<_, _>>().map_err(|error| error.to_string())
    }
}

/// What the flags of an export say, each word with a blank behind it.
fn names_of(set: u16) -> String {
    const NAMES: [(u16, &str); 12] = [
        (flags::READ_ONLY, "readonly"),
        (flags::FLUSH, "flush"),
        (flags::FUA, "fua"),
        (flags::ROTATIONAL, "rotational"),
        (flags::TRIM, "trim"),
        (flags::WRITE_ZEROES, "zeroes"),
        (flags::DF, "df"),
        (flags::CAN_MULTI_CONN, "multi"),
        (flags::RESIZE, "resize"),
        (flags::CACHE, "cache"),
        (flags::FAST_ZERO, "fast-zero"),
        (flags::BLOCK_STATUS_PAYLOAD, "block-status-payload"),
    ];
    NAMES.iter().filter(|(flag, _)| set & flag != 0).map(|(_, name)| format!("{name} ")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_shown_as_qemu_nbd_shows_them() {
        let all = "flush fua trim zeroes df cache fast-zero block-status-payload ";
        assert_eq!(names_of(0x1ced), all);
    }
}
