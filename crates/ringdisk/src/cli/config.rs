//! `--config FILE`: the words of `mount` and `serve` from a file.
//!
//! Promises: a key is the long name of an option without its dashes, and means what the option
//! means, with the same checks and messages; `image` and `mountpoint` are the names of those words.
//! A key that is none is refused, with the nearest one. An option of the command line replaces what
//! the file says of it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, CommandFactory, ValueHint};
use ringdisk_daemon::failure;
use toml::{Table, Value};

use crate::cli::disk_spec::DiskSpec;
use crate::cli::{Cli, command_of, refuse};

/// A file that is longer is none of ours, bytes.
const BYTES_MAX: u64 = 1 << 20;
/// Words that are as alike as this are taken for a slip (0 to 1).
const ALIKE: f64 = 0.75;

/// The words about the file itself.
#[derive(Args, Debug)]
pub(crate) struct ConfigArgs {
    /// Take options from FILE (TOML), whose keys are their long names: cache = "none"
    ///
    /// `image` and `mountpoint` are keys, too; an option that may be given several times takes a
    /// list, a switch true or false; disks of `serve` are [[disk]] tables. What is given on the
    /// command line replaces what FILE says of it.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Serving \
        options")]
    pub(crate) config: Option<PathBuf>,

    /// Only say whether the words, and those of --config, can be understood
    #[arg(long, help_heading = "Serving options")]
    pub(crate) check_config: bool,
}

/// Puts the words of `--config FILE` into a command line.
///
/// * `words`: of the process, its name first.
///
/// Errors: the file cannot be read, or says what is not understood.
pub(crate) fn expand(words: Vec<OsString>) -> Result<Vec<OsString>, clap::Error> {
    let is_command = |word: &OsString| !word.as_encoded_bytes().starts_with(b"-");
    let Some(at) = words.iter().skip(1).position(is_command).map(|at| at + 1) else {
        return Ok(words);
    };
    let name = match words[at].to_str() {
        Some(name @ ("mount" | "serve")) => name.to_owned(),
        _ => return Ok(words),
    };
    let Some(file) = given_file(&words[at + 1..]) else { return Ok(words) };
    let given = Cli::command().ignore_errors(true).try_get_matches_from(&words).ok();
    let given = given.as_ref().and_then(|given| given.subcommand_matches(&name));
    let wrong = |text: String| {
        let kind = ErrorKind::ValueValidation;
        refuse(&name, kind, format!("in '{}': {text}", file.display()))
    };
    let table = read(&file).map_err(wrong)?;
    let added = words_of(&name, &table, given).map_err(wrong)?;
    let (before, after) = words.split_at(at + 1);
    Ok([before, &added, after].concat())
}

/// The FILE of `--config`.
fn given_file(words: &[OsString]) -> Option<PathBuf> {
    let mut words = words.iter().take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        if word == "--config" {
            return words.next().map(PathBuf::from);
        }
        let bytes = word.as_encoded_bytes();
        if bytes.starts_with(b"--config=") {
            return word
                .to_str()
                .and_then(|text| text.strip_prefix("--config="))
                .map(PathBuf::from);
        }
    }
    None
}

fn read(file: &Path) -> Result<Table, String> {
    let mut text = String::new();
    let unreadable = |error: io::Error| match error.kind() {
        io::ErrorKind::InvalidData => "it is no text in UTF-8".to_owned(),
        _ => format!("it cannot be read: {}", failure::words(&error)),
    };
    let opened = File::open(file).map_err(unreadable)?;
    let count = opened.take(BYTES_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
    if count as u64 > BYTES_MAX {
        return Err(format!("it is longer than {BYTES_MAX} bytes"));
    }
    text.parse::<Table>().map_err(|error| error.to_string().trim_end().to_owned())
}

/// The words that a file stands for.
fn words_of(
    name: &str,
    table: &Table,
    given: Option<&ArgMatches>,
) -> Result<Vec<OsString>, String> {
    let command = command_of(name);
    let is_given = |arg: &Arg| {
        let id = arg.get_id().as_str();
        given.is_some_and(|given| {
            given.try_contains_id(id).unwrap_or(false)
                && given.value_source(id) == Some(ValueSource::CommandLine)
        })
    };
    let (mut options, mut places) = (Vec::new(), Vec::new());
    for (key, value) in table {
        if key == "disk" && name == "serve" {
            let disks = command.get_arguments().find(|arg| arg.get_long() == Some("disk"));
            if !disks.is_some_and(is_given) {
                options.extend(disk_words(value)?);
            }
            continue;
        }
        let arg = find(&command, key, &[])?;
        if arg.is_positional() {
            if is_given(arg) {
                return Err(format!("{key} is on the command line, too: leave one out"));
            }
            let Value::String(text) = value else {
                return Err(format!("{key} is not a text in quotes"));
            };
            places.push((arg.get_index(), OsString::from(text)));
        } else if !is_given(arg) {
            options.extend(option_words(arg, key, value)?);
        }
    }
    places.sort();
    options.extend(places.into_iter().map(|(_, word)| word));
    Ok(options)
}

/// The option, or the place, that a key stands for.
///
/// * `more`: keys beside the options.
fn find<'a>(command: &'a Command, key: &str, more: &[&str]) -> Result<&'a Arg, String> {
    let name_of = |arg: &'a Arg| match arg.get_long() {
        Some(long) => Some(long),
        None if arg.is_positional() => Some(arg.get_id().as_str()),
        None => None,
    };
    // What is about the words themselves, or about this one start.
    let is_key =
        |name: &str| !["config", "check-config", "help", "version", "upgrade"].contains(&name);
    let keys = || {
        let args = command.get_arguments().filter_map(move |arg| Some((name_of(arg)?, arg)));
        args.filter(move |(name, _)| is_key(name))
    };
    if let Some((_, arg)) = keys().find(|(name, _)| *name == key) {
        return Ok(arg);
    }
    let score = |name: &str| strsim::jaro_winkler(name, key);
    let all = keys().map(|(name, _)| name).chain(more.iter().copied());
    let nearest = all.map(|name| (score(name), name));
    let nearest = nearest.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > ALIKE);
    let key = key.escape_debug();
    Err(match nearest {
        Some((_, name)) => format!("unknown key '{key}'; did you mean '{name}'?"),
        None => format!("unknown key '{key}'; keys are the long options of this command"),
    })
}

/// An option as words of a command line.
fn option_words(arg: &Arg, key: &str, value: &Value) -> Result<Vec<OsString>, String> {
    if !arg.get_action().takes_values() {
        return match value {
            Value::Boolean(true) => Ok(vec![OsString::from(format!("--{key}"))]),
            Value::Boolean(false) => Ok(Vec::new()),
            _ => Err(format!("{key} is true or false")),
        };
    }
    let values = match value {
        Value::Array(values) if matches!(arg.get_action(), ArgAction::Append) => values.as_slice(),
        Value::Array(_) => return Err(format!("{key} is given once: it is no list")),
        other => std::slice::from_ref(other),
    };
    let word = |value: &Value| Ok(OsString::from(format!("--{key}={}", text_of(key, value)?)));
    values.iter().map(word).collect()
}

/// A value as text.
fn text_of(key: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Boolean(true) => Ok(String::from("on")),
        Value::Boolean(false) => Ok(String::from("off")),
        _ => Err(format!("{key} is a text in quotes, a number, true or false")),
    }
}

/// `[[disk]]` tables as `--disk` SPECs.
fn disk_words(value: &Value) -> Result<Vec<OsString>, String> {
    let tables =
        || -> Option<Vec<&Table>> { value.as_array()?.iter().map(Value::as_table).collect() };
    let tables = tables().ok_or("disks are written as [[disk]] tables")?;
    let command = DiskSpec::command();
    tables.into_iter().map(|table| Ok(disk_word(&command, table)?.into())).collect()
}

fn disk_word(command: &Command, table: &Table) -> Result<String, String> {
    let mut parts = Vec::new();
    for (key, value) in table {
        let values = match value {
            Value::Array(values) => values.as_slice(),
            other => std::slice::from_ref(other),
        };
        if key != "socket" {
            find(command, key, &["socket"]).map_err(|why| format!("a [[disk]]: {why}"))?;
        }
        for value in values {
            parts.push(format!("{key}={}", text_of(key, value)?.replace(',', ",,")));
        }
    }
    Ok(format!("--disk={}", parts.join(",")))
}

/// What is said with the words of a file that clap did not take.
pub(crate) fn with_file(words: &[OsString]) -> Option<String> {
    let file = given_file(words.get(1..).unwrap_or_default())?;
    let takes = |word: &OsStr| word == "mount" || word == "serve";
    words
        .iter()
        .any(|word| takes(word))
        .then(|| format!("(the words of '{}' are part of this command line)", file.display()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// The words that a file becomes with `before` on the command line.
    fn words(command: &str, text: &str, own: &[&str]) -> Result<Vec<String>, String> {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(text.as_bytes()).expect("written");
        let path = file.path().to_str().expect("UTF-8");
        let all = [&["ringdisk", command, "--config", path], own].concat();
        let all = all.into_iter().map(OsString::from).collect();
        let expanded = expand(all).map_err(|error| error.to_string())?;
        let expanded = expanded.into_iter().map(|word| word.into_string().expect("UTF-8"));
        Ok(expanded.skip(2).filter(|word| word != "--config" && word != path).collect())
    }

    #[test]
    fn keys_are_options_and_places() {
        let text = "mountpoint = '/srv/a'\nimage = '/a.qcow2'\ncache = 'none'\nthreads = 2\n\
                    resizable = true\nallow-other = false\nlimit = ['iops=5', 'bps=1M']\n";
        let found = words("mount", text, &[]).expect("good");
        let expected = ["--cache=none", "--threads=2", "--resizable", "--limit=iops=5"];
        assert!(expected.iter().all(|word| found.contains(&String::from(*word))), "{found:?}");
        assert_eq!(found[found.len() - 2..], ["/a.qcow2", "/srv/a"]);
        // The command line wins.
        let found = words("mount", text, &["--cache", "unsafe", "--limit", "none"]).expect("good");
        assert!(!found.iter().any(|word| word.starts_with("--cache=")), "{found:?}");
        assert!(!found.iter().any(|word| word.starts_with("--limit=")), "{found:?}");
        let both = words("mount", text, &["/b.qcow2"]).expect_err("both");
        assert!(both.contains("image is on the command line, too"), "{both}");
    }

    #[test]
    fn disks_are_tables() {
        let text = "nbd = ['/run/nbd.sock']\n[[disk]]\nimage = 'a,b.qcow2'\nexport-name = 'a'\n\
                    read-only = true\n[[disk]]\nimage = 'b'\nlimit = ['iops=5', 'group=x']\n";
        let found = words("serve", text, &[]).expect("good");
        assert_eq!(found[0], "--nbd=/run/nbd.sock");
        assert_eq!(found[1], "--disk=image=a,,b.qcow2,export-name=a,read-only=on");
        assert_eq!(found[2], "--disk=image=b,limit=iops=5,limit=group=x");
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (text, reason) in [
            ("cahce = 'none'", "unknown key 'cahce'; did you mean 'cache'?"),
            ("zzz = 1", "unknown key 'zzz'; keys are"),
            ("upgrade = true", "unknown key 'upgrade'"),
            ("config = 'x'", "unknown key"),
            ("resizable = 1", "resizable is true or false"),
            ("cache = ['none']", "it is no list"),
            ("cache = 1.5", "cache is a text"),
            ("image = 5", "image is not a text"),
            ("cache = none", "TOML"),
            ("cache = 'none'\ncache = 'none'", "duplicate key"),
            ("[disk]\nimage = 'x'", "unknown key 'disk'"),
        ] {
            let error = words("mount", text, &[]).expect_err(text);
            assert!(error.contains(reason), "{text}: {error}");
        }
        let error = words("serve", "disk = 5", &[]).expect_err("no table");
        assert!(error.contains("[[disk]] tables"), "{error}");
        let error = words("serve", "[[disk]]\nimgae = 'x'", &[]).expect_err("a slip");
        assert!(error.contains("did you mean 'image'?"), "{error}");
    }

    #[test]
    fn other_commands_and_words_are_left_alone() {
        let all = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        for words in
            [&["ringdisk"][..], &["ringdisk", "info", "--config", "x"], &["ringdisk", "mount", "a"]]
        {
            assert_eq!(expand(all(words)).expect("as they were"), all(words));
        }
        assert!(expand(all(&["ringdisk", "mount", "--config", "/no/such/file"])).is_err());
    }
}
