//! Log lines of the control path, in the shape of our other messages.
//!
//! Promises: `ringdisk: warning: text` on standard error; a stream that cannot be written never
//! ends the process. Colours as in our other messages: on a terminal only. A command that opens an
//! image several times gives each warning once; a server repeats them, since each stands for
//! something that happened at that moment.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use ringdisk_daemon::log_target::{Subject, next_is_about};
use ringdisk_daemon::terminal::{NAME, paint_error, paint_warning, write_error};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// Warnings that a command keeps in mind so as not to repeat them; those after them are all
/// written.
const REMEMBERED_MAX: usize = 1000;

/// Starts logging; once per process.
///
/// * `verbose`: how often `-v` was given: warnings, progress, details, everything.
/// * `serves`: the process goes on after it has begun, so it repeats its warnings.
pub fn start(verbose: u8, serves: bool) {
    begin(verbose, serves, None);
}

/// The same for a server that stands in for a program which does not say some things.
///
/// * `target`: of the events that are not written.
pub fn start_without(verbose: u8, target: &'static str) {
    begin(verbose, true, Some(target));
}

fn begin(verbose: u8, serves: bool, hidden: Option<&'static str>) {
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let builder = tracing_subscriber::fmt()
        .with_max_level(level)
        // The default reports a failed write with a macro that panics.
        .log_internal_errors(false)
        .fmt_fields(Message)
        // The names of fields would be in italics in files too.
        .with_ansi(false)
        .with_writer(StandardError { warned: (!serves).then(Mutex::default), hidden })
        .event_format(Line);
    let _ = tracing::subscriber::set_global_default(builder.finish());
}

/// Standard error, whose failures nobody needs to hear of.
struct StandardError {
    /// The warnings that were written, where each is to be written once.
    warned: Option<Mutex<HashSet<Vec<u8>>>>,
    /// The target of events that are not written.
    hidden: Option<&'static str>,
}

impl<'a> MakeWriter<'a> for StandardError {
    type Writer = EventWriter<'a>;

    fn make_writer(&'a self) -> EventWriter<'a> {
        EventWriter { warned: None, is_hidden: false }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> EventWriter<'a> {
        EventWriter {
            warned: self.warned.as_ref().filter(|_| *meta.level() == Level::WARN),
            is_hidden: self.hidden == Some(meta.target()),
        }
    }
}

/// Writes one event, which tracing hands over as a whole.
struct EventWriter<'a> {
    warned: Option<&'a Mutex<HashSet<Vec<u8>>>>,
    is_hidden: bool,
}

impl Write for EventWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_hidden && self.warned.is_none_or(|warned| is_new(warned, bytes)) {
            write_error(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a warning was not written before; it is remembered.
fn is_new(warned: &Mutex<HashSet<Vec<u8>>>, line: &[u8]) -> bool {
    let mut warned = warned.lock().unwrap_or_else(PoisonError::into_inner);
    if warned.len() >= REMEMBERED_MAX {
        !warned.contains(line)
    } else {
        warned.insert(line.to_vec())
    }
}

/// Fields that say what a message is about; people read that in the message itself.
const SUBJECT: [&str; 2] = ["disk", "event"];

/// The message, and the other fields.
struct Message;

impl<'writer> FormatFields<'writer> for Message {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: Writer<'writer>,
        fields: R,
    ) -> fmt::Result {
        let mut text = Text { writer: &mut writer, result: Ok(()) };
        fields.record(&mut text);
        text.result
    }
}

struct Text<'a, 'writer> {
    writer: &'a mut Writer<'writer>,
    result: fmt::Result,
}

impl Visit for Text<'_, '_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let written = match field.name() {
            "message" => write!(self.writer, "{value:?}"),
            name if SUBJECT.contains(&name) => Ok(()),
            name => write!(self.writer, " {name}={value:?}"),
        };
        self.result = self.result.and(written);
    }
}

/// Finds the fields of [`SUBJECT`].
#[derive(Default)]
struct About(Subject);

impl Visit for About {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "disk" => self.0.disk = Some(value.to_owned()),
            "event" => self.0.event = Some(value.to_owned()),
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

/// One event as one line.
struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut about = About::default();
        event.record(&mut about);
        next_is_about(about.0);
        match *event.metadata().level() {
            Level::ERROR => write!(writer, "{NAME}: {} ", paint_error("error:"))?,
            Level::WARN => write!(writer, "{NAME}: {} ", paint_warning("warning:"))?,
            Level::INFO => write!(writer, "{NAME}: ")?,
            Level::DEBUG => write!(writer, "{NAME}: debug: ")?,
            Level::TRACE => write!(writer, "{NAME}: trace: ")?,
        }
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
