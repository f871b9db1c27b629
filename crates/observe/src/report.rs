//! What a bug report needs, in one text.
//!
//! Promises: nothing of the content of a disk and no password goes into it. What cannot be found
//! out is said so in its place, and the rest is written all the same. A server that does not answer
//! costs some seconds.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::process::{Command as Program, Stdio};
use std::time::{Duration, SystemTime};

use ringdisk_console::output::{json_text, without_text};
use ringdisk_daemon::control::many::Answer;
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::processes::{self, Entry};
use ringdisk_daemon::terminal::{visible, visible_lines};
use ringdisk_daemon::when::utc_time;
use ringdisk_disk::{Disk, ImageOptions, Source, describe};
use ringdisk_images::look;

/// How long servers may take.
const LIMIT: Duration = Duration::from_secs(3);
/// The end of a log file that is taken, bytes.
const LOG_BYTES_MAX: u64 = 64 << 10;
/// The last lines of the journal that are taken.
const JOURNAL_LINES: &str = "300";

/// The text of a report.
///
/// Errors: there is no mount table.
pub fn report() -> Result<String, Failure> {
    let entries = processes::list(true)?;
    let mut text = format!("Report of ringdisk, {}\n", utc_time(SystemTime::now()));
    section(&mut text, "Versions", &versions());
    section(&mut text, "Served", &json_text(&processes::to_json(&entries)));
    for entry in &entries {
        if let Some(pid) = entry.pid {
            section(&mut text, &format!("Options of process {pid}"), &options(pid));
        }
    }
    for (found, asked) in processes::ask_all(&Command::Stats, LIMIT) {
        let title = format!("Counters of '{}'", found.path.display());
        let said = match asked.answer {
            Answer::Value(value) => json_text(&without_text(value)),
            other => format!("none: {other:?}"),
        };
        section(&mut text, &title, &said);
    }
    for image in images(&entries) {
        section(&mut text, &format!("Header of '{image}'"), &header(Path::new(&image)));
    }
    section(&mut text, "Log", &log(&entries));
    Ok(text)
}

/// * `said`: may come from any process.
fn section(text: &mut String, title: &str, said: &str) {
    let _ = writeln!(text, "\n== {} ==\n{}", visible(title), visible_lines(said.trim_end()));
}

fn versions() -> String {
    let mut text = format!("ringdisk {}\n", env!("CARGO_PKG_VERSION"));
    for path in ["/proc/version", "/etc/os-release", "/proc/sys/kernel/io_uring_disabled"] {
        let content = fs::read_to_string(path).unwrap_or_else(|_| String::from("not there"));
        let _ = writeln!(text, "{path}:\n{}", content.trim_end());
    }
    let enabled = fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let _ = writeln!(text, "FUSE over io_uring: {}", enabled.unwrap_or_default().trim());
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let _ = writeln!(text, "CPUs: {cpus}");
    text
}

/// The command line of a process, without what is secret.
fn options(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<String> = line
        .split(|byte| *byte == 0)
        .filter(|word| !word.is_empty())
        .map(|word| without_secrets(&String::from_utf8_lossy(word)))
        .collect();
    words.join("\n")
}

/// A word of a command line without passwords: those of addresses, and values of keys that are
/// called so.
fn without_secrets(word: &str) -> String {
    const NAMES: [&str; 4] = ["password", "secret", "token", "key="];
    let small = word.to_lowercase();
    if let Some(at) = NAMES.iter().filter_map(|name| small.find(name)).min() {
        let end = word[at..].find(['=', ':']).map_or(word.len(), |end| at + end + 1);
        return format!("{}(left out)", word.get(..end).unwrap_or_default());
    }
    match (word.find("://"), word.find('@')) {
        (Some(scheme), Some(at)) if scheme < at => {
            let (before, after) = (&word[..scheme + 3], &word[at..]);
            format!("{before}(left out){after}")
        }
        _ => word.to_owned(),
    }
}

/// The images that are files, each once.
fn images(entries: &[Entry]) -> Vec<String> {
    let is_file = |name: &String| Path::new(name).is_absolute();
    let mut names: Vec<String> =
        entries.iter().map(|entry| entry.image.clone()).filter(is_file).collect();
    names.sort();
    names.dedup();
    names
}

/// What is known of an image by its header.
fn header(image: &Path) -> String {
    let read = || -> Result<String, Failure> {
        let mut runtime = look::runtime()?;
        let ring = runtime.ring().clone();
        let options = ImageOptions {
            read_only: true,
            force_share: true,
            without_backing: true,
            ..ImageOptions::default()
        };
        let source = Source::Path(image.to_owned());
        let disk = runtime.block_on(Disk::open(&ring, source, &options))?;
        let layers = disk.layers();
        Ok(layers.first().map(|layer| json_text(&describe::layer(layer))).unwrap_or_default())
    };
    read().unwrap_or_else(|failure| format!("it cannot be read: {}", failure.message()))
}

/// The end of the log files that command lines name, and of the journal.
fn log(entries: &[Entry]) -> String {
    let mut text = String::new();
    for pid in entries.iter().filter_map(|entry| entry.pid) {
        let line = options(pid);
        let mut words = line.lines();
        while let Some(word) = words.next() {
            let file = match word.strip_prefix("--log-file") {
                Some("") => words.next().unwrap_or_default(),
                Some(rest) => rest.trim_start_matches('='),
                None => continue,
            };
            let _ = writeln!(text, "{file}:\n{}", tail(Path::new(file)));
        }
    }
    let journal = Program::new("journalctl")
        .args(["-t", "ringdisk", "-n", JOURNAL_LINES, "--no-pager", "-o", "short-iso"])
        .stdin(Stdio::null())
        .output();
    match journal {
        Ok(output) => text.push_str(&String::from_utf8_lossy(&output.stdout)),
        Err(error) => {
            let _ = writeln!(text, "no journal: {error}");
        }
    }
    text
}

/// The end of a file; of a regular one only, as a FIFO has none.
fn tail(path: &Path) -> String {
    let read = || -> std::io::Result<String> {
        if !fs::metadata(path)?.is_file() {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        let mut file = fs::File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(LOG_BYTES_MAX)))?;
        let mut bytes = Vec::new();
        file.take(LOG_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_else(|error| format!("it cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_left_out_and_other_words_are_not() {
        for (word, expected) in [
            ("--pidfile=/run/a", "--pidfile=/run/a"),
            ("nbd://host/name", "nbd://host/name"),
            ("nbd://me:pw@host/name", "nbd://(left out)@host/name"),
            ("rbd:pool/a:key=AQ==", "rbd:pool/a:key=(left out)"),
            ("--token=abc", "--token=(left out)"),
            ("a@b", "a@b"),
        ] {
            assert_eq!(without_secrets(word), expected);
        }
    }
}
