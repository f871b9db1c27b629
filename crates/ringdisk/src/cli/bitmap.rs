//! The words of `ringdisk bitmap`.
//!
//! Promises: parses only; its actions are done in the order in which they were given, which a plain
//! definition cannot tell.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches, ValueHint};
use ringdisk_daemon::size::parse_size;
use ringdisk_disk::Format;
use ringdisk_images::bitmap::Work;

use crate::cli::format_parser;
use crate::cli::inspect::{NameArgs, PoolArgs};
use crate::cli::names::{parse_bitmap, parse_existing};

/// Change the bitmaps inside an image
///
/// A bitmap remembers which parts of the disk were written to. Actions are done in the order in
/// which they are given.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
#[command(override_usage = "ringdisk bitmap [OPTIONS] ACTION... FILE [BITMAP]")]
pub(crate) struct BitmapArgs {
    /// Format of FILE [default: look at its first bytes]
    #[arg(short, long, value_parser = format_parser())]
    pub(crate) format: Option<Format>,

    /// Bytes of the disk for each bit of a new bitmap, a power of two [default: 64K]
    #[arg(short, long, value_name = "SIZE", value_parser = parse_granularity, requires = "add")]
    pub(crate) granularity: Option<u64>,

    /// Image with the source of --merge [default: FILE]
    #[arg(short = 'b', long, value_name = "FILE", value_hint = ValueHint::FilePath,
          requires = "merge")]
    pub(crate) source_file: Option<PathBuf>,

    /// Format of the source file
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = format_parser(),
          requires = "source_file")]
    pub(crate) source_format: Option<Format>,

    #[command(flatten)]
    works: Works,

    /// The image
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) file: PathBuf,

    /// The bitmap, for everything but --remove-all
    #[arg(value_name = "BITMAP", value_parser = parse_existing)]
    pub(crate) bitmap: Option<String>,

    #[command(flatten)]
    pub(crate) name: NameArgs,

    #[command(flatten)]
    pub(crate) pool: PoolArgs,
}

impl BitmapArgs {
    /// What to do, in order.
    ///
    /// Errors: nothing to do; a name is missing, or there although nothing needs it; a new name
    /// that cannot be.
    pub(crate) fn works(&self) -> Result<&[Work], clap::Error> {
        use clap::error::ErrorKind;
        let refuse = |kind, text: &str| Err(super::refuse("bitmap", kind, text));
        let works = self.works.0.as_slice();
        if works.is_empty() {
            return refuse(
                ErrorKind::MissingRequiredArgument,
                "nothing to do: give --add, --remove, --remove-all, --clear, --enable, --disable \
                 or \
                 --merge",
            );
        }
        let needs_name = works.iter().any(|work| *work != Work::RemoveAll);
        match &self.bitmap {
            None if needs_name => {
                refuse(ErrorKind::MissingRequiredArgument, "the name of the BITMAP is missing")
            }
            Some(_) if !needs_name => {
                refuse(ErrorKind::TooManyValues, "--remove-all takes no BITMAP")
            }
            Some(name) if works.contains(&Work::Add) => match parse_bitmap(name) {
                Ok(_) => Ok(works),
                Err(text) => refuse(ErrorKind::ValueValidation, &text),
            },
            _ => Ok(works),
        }
    }
}

fn parse_granularity(text: &str) -> Result<u64, String> {
    const RANGE: std::ops::RangeInclusive<u64> = 512..=2 << 30;
    match parse_size(text)? {
        size if size.is_power_of_two() && RANGE.contains(&size) => Ok(size),
        _ => Err(String::from("write a power of two from 512 to 2G")),
    }
}

/// All actions, in order.
#[derive(Clone, Debug, Default)]
struct Works(Vec<Work>);

/// Flags: the id, what it does, its help.
const FLAGS: [(&str, Work, &str); 6] = [
    ("add", Work::Add, "Make the bitmap; writes are recorded in it from now on"),
    ("remove", Work::Remove, "Remove the bitmap"),
    ("remove-all", Work::RemoveAll, "Remove all bitmaps"),
    ("clear", Work::Clear, "Forget what the bitmap has recorded"),
    ("enable", Work::Enable, "Record writes in the bitmap"),
    ("disable", Work::Disable, "Record writes in it no longer"),
];

impl Args for Works {
    fn augment_args(mut command: clap::Command) -> clap::Command {
        for (id, _, help) in FLAGS {
            // Appended, so that the place of each one is known.
            let arg = Arg::new(id).long(id).help(help).action(ArgAction::Append).num_args(0);
            command = command.arg(arg.default_missing_value("true").help_heading("Actions"));
        }
        command.arg(
            Arg::new("merge")
                .long("merge")
                .value_name("SOURCE")
                .help("Add what the bitmap SOURCE has recorded")
                .value_parser(parse_existing)
                .action(ArgAction::Append)
                .help_heading("Actions"),
        )
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Works::augment_args(command)
    }
}

impl FromArgMatches for Works {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Works, clap::Error> {
        let given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let mut all = Vec::new();
        for (id, work, _) in FLAGS {
            if given(id) {
                all.extend(
                    matches.indices_of(id).into_iter().flatten().map(|at| (at, work.clone())),
                );
            }
        }
        let sources = matches.get_many::<String>("merge").into_iter().flatten();
        let places = matches.indices_of("merge").into_iter().flatten();
        all.extend(places.zip(sources).map(|(at, name)| (at, Work::Merge(name.clone()))));
        all.sort_by_key(|(at, _)| *at);
        Ok(Works(all.into_iter().map(|(_, work)| work).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Works::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn bitmap(words: &str) -> Result<BitmapArgs, clap::Error> {
        let all = ["ringdisk", "bitmap"].into_iter().chain(words.split_whitespace());
        match Cli::try_parse_from(all)?.command {
            Command::Bitmap(args) => Ok(args),
            other => panic!("not bitmap: {other:?}"),
        }
    }

    #[test]
    fn actions_keep_their_order() {
        let args = bitmap("--merge a --add --clear --merge b --disable -g 4k x.qcow2 new")
            .expect("parses");
        let works = args.works().expect("sound");
        let merge = |name: &str| Work::Merge(name.to_owned());
        assert_eq!(works, [merge("a"), Work::Add, Work::Clear, merge("b"), Work::Disable]);
        assert_eq!(args.granularity, Some(4096));
    }

    #[test]
    fn words_without_sense_are_refused() {
        for words in [
            "x.qcow2 b",
            "--add x.qcow2",
            "--remove-all x.qcow2 b",
            "--clear -g 64k x.qcow2 b",
            "--add -g 3000 x.qcow2 b",
            "--add -b y.qcow2 x.qcow2 b",
        ] {
            let refused = bitmap(words).and_then(|args| args.works().map(<[_]>::to_vec));
            assert_eq!(refused.expect_err(words).exit_code(), 2, "{words}");
        }
        assert!(bitmap("--remove-all x.qcow2").expect("parses").works().is_ok());
    }
}
