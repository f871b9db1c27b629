//! What a bug report needs, in one text.
//!
//! Promises: nothing of the content of a disk, of the environment of a process, or of a file that
//! no server writes as its log goes into it, and no password or key that can be known as one. What
//! cannot be found out is said so in its place, and the rest is written all the same. A server that
//! does not answer costs some seconds.

mod secrets;

use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command as Program, Stdio};
use std::time::{Duration, SystemTime};

use ringdisk_console::output::{json_text, without_text};
use ringdisk_daemon::control::ask_all::Answer;
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::processes::{self, Entry};
use ringdisk_daemon::terminal::{visible, visible_lines};
use ringdisk_daemon::timestamp::utc_time;
use ringdisk_disk::{Disk, ImageOptions, Source, describe};
use ringdisk_images::inspect;
use rustix::fs::OFlags;

use secrets::{without_secrets, words_without_secrets};

/// How long servers may take to answer for a report (3 s).
const REPORT_LIMIT: Duration = Duration::from_secs(3);
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
            let said = words_without_secrets(&words(pid));
            section(&mut text, &format!("Options of process {pid}"), &said);
        }
    }
    for (found, asked) in processes::ask_all(&Command::Stats, REPORT_LIMIT) {
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

/// * `said`: may come from any process, and have secrets in it: names of images, of backing files
///   in headers, lines of logs.
fn section(text: &mut String, title: &str, said: &str) {
    let (title, said) = (without_secrets(title), without_secrets(said));
    let _ = writeln!(text, "\n== {} ==\n{}", visible(&title), visible_lines(said.trim_end()));
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

/// The command line of a process.
fn words(pid: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
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
        let mut runtime = inspect::runtime()?;
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
        for file in log_files(&words(pid)) {
            let _ = writeln!(text, "{file}:\n{}", tail(Path::new(&file), pid));
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

/// The log files that a command line names.
fn log_files(words: &[String]) -> Vec<String> {
    let mut words = words.iter();
    let mut files = Vec::new();
    while let Some(word) = words.next() {
        match word.strip_prefix("--log-file") {
            Some("") => files.extend(words.next().cloned()),
            Some(rest) => files.extend(rest.strip_prefix('=').map(str::to_owned)),
            None => {}
        }
    }
    files
}

/// The end of a log file, in whole lines; of a regular one only, as a FIFO has none.
///
/// * `pid`: the process that writes it. What a command line says any process may say, and the user
///   of this one may read more than the user of that one.
fn tail(path: &Path, pid: u32) -> String {
    let read = || -> std::io::Result<String> {
        let meta = fs::metadata(path)?;
        if !meta.is_file() {
            return Err(std::io::Error::other("it is no regular file"));
        }
        let mut file = fs::File::open(path)?;
        let meta = file.metadata()?;
        if !is_written_by(&meta, pid) {
            return Err(std::io::Error::other("the process does not write it"));
        }
        let from = meta.len().saturating_sub(LOG_BYTES_MAX);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(LOG_BYTES_MAX).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        // Half a line may be half a secret, of which nothing says that it is one.
        let is_whole = |(_, rest): (&str, &str)| rest.to_owned();
        Ok(if from == 0 { text } else { text.split_once('\n').map(is_whole).unwrap_or_default() })
    };
    read().unwrap_or_else(|error| format!("it is not shown: {error}"))
}

/// Whether a process has a file open for writing.
fn is_written_by(file: &fs::Metadata, pid: u32) -> bool {
    let is_it = |number: &str| {
        let open = fs::metadata(format!("/proc/{pid}/fd/{number}"));
        open.is_ok_and(|open| (open.dev(), open.ino()) == (file.dev(), file.ino()))
            && is_for_writing(pid, number)
    };
    let Ok(numbers) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    numbers.flatten().any(|number| number.file_name().to_str().is_some_and(is_it))
}

/// Whether a descriptor of a process was opened for writing, and not as a mere place (`O_PATH`).
///
/// Source: proc_pid_fdinfo(5): `flags` in octal.
fn is_for_writing(pid: u32, number: &str) -> bool {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    let flags = flags.map_or(OFlags::empty(), OFlags::from_bits_retain);
    flags.intersects(OFlags::WRONLY | OFlags::RDWR) && !flags.contains(OFlags::PATH)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn log_files_are_found_in_either_form() {
        let words = ["mount", "--log-file", "/a", "--log-file=/b", "--log-files", "--log-file"];
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        assert_eq!(log_files(&words), ["/a", "/b"]);
    }

    #[test]
    fn only_a_process_that_has_a_file_open_for_writing_writes_it() {
        use rustix::fs::{Mode, open};
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("log");
        fs::write(&path, "a line\n").expect("write");
        let meta = path.metadata().expect("it is there");
        let this = std::process::id();
        assert!(!is_written_by(&meta, this), "it is not open");
        for flags in [OFlags::RDONLY, OFlags::PATH, OFlags::PATH | OFlags::RDWR] {
            let _open = open(&path, flags | OFlags::CLOEXEC, Mode::empty()).expect("open");
            assert!(!is_written_by(&meta, this), "{flags:?}");
        }
        assert!(tail(&path, this).contains("does not write it"));
        for flags in [OFlags::WRONLY, OFlags::RDWR, OFlags::WRONLY | OFlags::APPEND] {
            let _open = open(&path, flags | OFlags::CLOEXEC, Mode::empty()).expect("open");
            assert!(is_written_by(&meta, this), "{flags:?}");
            assert_eq!(tail(&path, this), "a line\n");
        }
    }

    #[test]
    fn the_end_of_a_log_begins_with_a_whole_line() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("log");
        let cut = "x".repeat(usize::try_from(LOG_BYTES_MAX).expect("small"));
        let mut file = fs::File::create(&path).expect("a file");
        file.write_all(format!("password={cut}\nthe last\n").as_bytes()).expect("write");
        assert_eq!(tail(&path, std::process::id()), "the last\n");
    }
}
