//! Log lines of the control path, in the shape of our other messages.
//!
//! Promises: `ringdisk: warning: text` on standard error; a stream that cannot be written never
//! ends the process. Colours as in our other messages: on a terminal only.

use std::fmt;
use std::io::{self, Write};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::terminal::{NAME, paint_error, paint_warning, write_error};

/// Starts logging; once per process.
///
/// * `verbose`: how often `-v` was given: warnings, progress, details, everything.
pub(crate) fn start(verbose: u8) {
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
        // The names of fields would be in italics in files too.
        .with_ansi(false)
        .with_writer(|| Quiet)
        .event_format(Line);
    let _ = tracing::subscriber::set_global_default(builder.finish());
}

/// Standard error, whose failures nobody needs to hear of.
struct Quiet;

impl Write for Quiet {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_error(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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
