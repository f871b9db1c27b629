//! Programs from which system calls are taken away, as the seccomp profile of a container does.
//!
//! The filter is for a thread and what it executes; so a test that is left out by name is the
//! launcher, in a process of its own: [`launch`] in its body, [`Forbidden::command`] for the rest.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use serde_json::{Value, json};

/// What the launcher reads.
const WORDS: &str = "RINGDISK_TEST_LAUNCH";

/// A call, by its number: the same on all architectures (they are newer than the common table).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Setup = 425,
    Enter = 426,
    Register = 427,
}

/// Calls that fail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forbidden<'a> {
    pub(crate) calls: &'a [Call],
    /// With what.
    pub(crate) errno: rustix::io::Errno,
    /// Only where the first argument is greater.
    pub(crate) above: Option<u32>,
}

impl Forbidden<'_> {
    /// `words`, started by the test `launcher` of the calling program.
    pub(crate) fn command(&self, launcher: &str, words: &[&str]) -> Command {
        let numbers: Vec<i64> = self.calls.iter().map(|call| *call as i64).collect();
        let what = json!({
            "calls": numbers, "errno": self.errno.raw_os_error(), "above": self.above,
            "words": words,
        });
        let this = std::env::current_exe().expect("this program");
        let mut command = Command::new(this);
        command
            .args(["--exact", launcher, "--ignored", "--nocapture"])
            .env(WORDS, what.to_string());
        command
    }
}

/// Takes the calls away and becomes the program. Does not return; nothing happens when it was not
/// started by [`Forbidden::command`].
pub(crate) fn launch() {
    let Ok(what) = std::env::var(WORDS) else { return };
    let what: Value = serde_json::from_str(&what).expect("words of a test");
    let list = |key: &str| what[key].as_array().expect("a list").clone();
    let errno = what["errno"].as_u64().and_then(|errno| u32::try_from(errno).ok());
    let rules = |call: &Value| {
        let above = what["above"].as_u64().map(|limit| {
            let condition =
                SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Gt, limit);
            SeccompRule::new(vec![condition.expect("a condition")]).expect("a rule")
        });
        (call.as_i64().expect("a number"), above.into_iter().collect())
    };
    let calls: BTreeMap<i64, Vec<SeccompRule>> = list("calls").iter().map(rules).collect();
    let refusal = SeccompAction::Errno(errno.expect("an errno"));
    let machine = TargetArch::try_from(std::env::consts::ARCH).expect("a known machine");
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, refusal, machine);
    let program: BpfProgram = filter.and_then(TryInto::try_into).expect("a filter");
    seccompiler::apply_filter(&program).expect("seccomp");
    let words = list("words");
    let words: Vec<&str> = words.iter().map(|word| word.as_str().expect("a word")).collect();
    let error = Command::new(words[0]).args(&words[1..]).env_remove(WORDS).exec();
    panic!("{}: {error}", words[0]);
}
