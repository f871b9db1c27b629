//! `--disk KEY=VALUE,…`: options of one disk, written in one word.
//!
//! Promises: a SPEC means what its keys mean as options of the command line, with the same checks
//! and messages; what was given on the command line itself holds for every disk whose SPEC does not
//! say otherwise.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, CommandFactory, FromArgMatches, Parser};

use super::disk_args::DiskArgs;

/// Other names of keys: what is short in a SPEC and says what it is in an option.
const SHORT: [(&str, &str); 1] = [("socket", "vhost-user-blk")];

/// The words of one `--disk`, after its keys were made options.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
pub(crate) struct DiskSpec {
    #[arg(long, value_name = "FILE", conflicts_with = "null")]
    pub(super) image: Option<PathBuf>,
    #[command(flatten)]
    pub(super) one: DiskArgs,
}

/// Options of single disks that were given for all of them, as words.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskWords(Vec<Given>);

/// One option of the command line.
#[derive(Clone, Debug)]
struct Given {
    /// Its identifier, which is the same with all commands.
    id: String,
    words: Vec<OsString>,
}

/// A group of options without options: it only looks at what was given.
impl Args for DiskWords {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for DiskWords {
    fn from_arg_matches(matches: &ArgMatches) -> Result<DiskWords, clap::Error> {
        let known = DiskSpec::command();
        let is_given = |arg: &&Arg| {
            let id = arg.get_id().as_str();
            matches.try_contains_id(id).unwrap_or(false)
                && matches.value_source(id) == Some(ValueSource::CommandLine)
        };
        let given = known.get_arguments().filter(is_given);
        Ok(DiskWords(
            given
                .map(|arg| {
                    let id = arg.get_id().as_str();
                    let values = matches.get_raw(id).into_iter().flatten();
                    Given { id: id.to_owned(), words: words(arg, values.map(OsString::from)) }
                })
                .collect(),
        ))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = DiskWords::from_arg_matches(matches)?;
        Ok(())
    }
}

/// An option as words of a command line.
fn words(arg: &Arg, values: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let long = OsString::from(format!("--{}", arg.get_long().unwrap_or_default()));
    if !arg.get_action().takes_values() {
        return vec![long];
    }
    let word = |value: OsString| {
        let mut word = long.clone();
        word.push("=");
        word.push(value);
        word
    };
    values.map(word).collect()
}

impl DiskWords {
    /// Whether an option was given for all disks.
    ///
    /// * `id`: its identifier.
    pub(super) fn has(&self, id: &str) -> bool {
        self.0.iter().any(|given| given.id == id)
    }

    /// Reads a SPEC.
    ///
    /// Errors: unknown keys, bad values, keys that exclude each other; the text names the SPEC.
    pub(super) fn parse(&self, spec: &str) -> Result<DiskSpec, (ErrorKind, String)> {
        let mut command = DiskSpec::command();
        command.build();
        let in_spec = |text: &str| format!("in --disk '{spec}': {text}");
        let mut said: Vec<&Arg> = Vec::new();
        let mut own = Vec::new();
        for pair in pairs(spec) {
            let (key, value) = match pair.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (pair.as_str(), None),
            };
            let arg = find(&command, key).ok_or_else(|| {
                (
                    ErrorKind::UnknownArgument,
                    in_spec(&format!("there is no key '{key}'; known are {}", keys(&command))),
                )
            })?;
            let is_list = matches!(arg.get_action(), ArgAction::Append);
            if !is_list && said.iter().any(|other| other.get_id() == arg.get_id()) {
                return Err((
                    ErrorKind::ArgumentConflict,
                    in_spec(&format!("'{key}' is there twice")),
                ));
            }
            said.push(arg);
            own.extend(words_of(arg, key, value).map_err(|(kind, text)| (kind, in_spec(&text)))?);
        }
        let excluded: Vec<&str> = said
            .iter()
            .flat_map(|arg| {
                let theirs = command.get_arguments().filter(|other| {
                    command
                        .get_arg_conflicts_with(other)
                        .iter()
                        .any(|with| with.get_id() == arg.get_id())
                });
                command.get_arg_conflicts_with(arg).into_iter().chain(theirs).chain([*arg])
            })
            .map(|arg| arg.get_id().as_str())
            .collect();
        let general = self.0.iter().filter(|given| !excluded.contains(&given.id.as_str()));
        let all = general.flat_map(|given| given.words.clone()).chain(own);
        let matches = DiskSpec::command().try_get_matches_from(all);
        matches
            .and_then(|matches| DiskSpec::from_arg_matches(&matches))
            .map_err(|error| (error.kind(), in_spec(&reason(&error))))
    }
}

/// The parts of a SPEC: split at commas, of which two stand for one.
fn pairs(spec: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = spec.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' && chars.next_if_eq(&',').is_none() {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(c);
        }
    }
    parts
}

fn find<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    let long = SHORT.iter().find(|(short, _)| *short == key).map_or(key, |(_, long)| long);
    command.get_arguments().find(|arg| arg.get_long() == Some(long))
}

/// All keys, for the message about one that is none.
fn keys(command: &Command) -> String {
    let short = SHORT.iter().map(|(short, _)| *short);
    let long = command.get_arguments().filter_map(Arg::get_long);
    let long = long.filter(|long| SHORT.iter().all(|(_, other)| other != long));
    short.chain(long).collect::<Vec<_>>().join(", ")
}

/// One key as words.
fn words_of(
    arg: &Arg,
    key: &str,
    value: Option<&str>,
) -> Result<Vec<OsString>, (ErrorKind, String)> {
    if arg.get_action().takes_values() {
        return match value {
            Some(value) => Ok(words(arg, [OsString::from(value)].into_iter())),
            // An option whose value may be left out.
            None if arg.get_num_args().is_some_and(|count| count.min_values() == 0) => {
                Ok(vec![OsString::from(format!("--{key}"))])
            }
            None => Err((ErrorKind::InvalidValue, format!("a value is missing: {key}=..."))),
        };
    }
    match value {
        None | Some("on") => Ok(words(arg, std::iter::empty())),
        Some("off") => Ok(Vec::new()),
        Some(_) => Err((ErrorKind::InvalidValue, format!("write {key}, {key}=on or {key}=off"))),
    }
}

/// What is wrong, without the usage of a command that nobody has typed.
fn reason(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = text.find("\n\nUsage:").or_else(|| text.find("\n\nFor more information"));
    text.get(..end.unwrap_or(text.len())).unwrap_or(text).trim_end().to_owned()
}
