"""The words and templates of `reasoning_tasks`, which says how to read them."""

WORDS = {
    "name": "tom ann bob eve max sue leo ida",
    "item": "apples coins books pens cups balls stones shells",
    "place": "garden house school shop park kitchen forest market",
    "letter": "b c d f g h j k",
    "thing": "rain snow wind fire music light smoke fog",
    "unknown": "x y z w",
    "adjective": "old small red happy quiet big green young",
    "animal": "dog cat horse bird fox cow",
    "verb": "runs sleeps waits sings walks rests",
}

# Words of one meaning: dictionary entries in general text.
GLOSSARY = (
    "gets finds buys wins receives collects",
    "got found bought won received collected",
    "loses sells eats breaks drops spends",
    "lost sold ate broke dropped spent",
    "has owns holds keeps",
    "had owned held kept",
    "plus and",
    "minus less",
    "equals is makes gives",
    "list row series",
    "reverse flip invert",
    "sort arrange order",
    "last final ending",
    "find give tell name",
    "total sum amount",
    "now finally afterwards later",
    "result outcome value",
    "follows comes results",
    "times often occurrences",
    "left remaining over",
    "first start beginning",
)

# How often a kind of general text comes, 1 where nothing is said.
WEIGHTS = {"echo": 6, "table": 8, "copy": 4, "rules": 4, "orders": 3, "chains": 3, "count": 2}

GENERAL = {
    "statement": (
        "{name} [has|owns|holds|keeps] {a} {item} in the {place} .",
        "{name1} [gets|finds|buys|wins|receives|collects] {b} {item} [at|in|from] the {place} .",
        "{name1} [loses|sells|eats|breaks|drops|spends] {b} {item} [at|in|from] the {place} .",
        "[yesterday|today|later|afterwards] {name} [got|found|bought|won|received|collected] {b} "
        "more {item} , so {name1} had more than before .",
        "[yesterday|today|later|afterwards] {name} [lost|sold|ate|broke|dropped|spent] {b} of the "
        "{item} , so there were fewer left over than before .",
        "at first {name} [had|owned|held|kept] {a} {item} and in the end all of them were in the "
        "{place} .",
    ),
    "sentence": (
        "the {adjective} {animal} {verb} [in|at|near] the {place} and the {adjective1} {animal1} "
        "{verb1} .",
        "how [old|big|small|young] is the {animal} of {name} ? it is very {adjective} .",
        "who {verb} [in|at|near] the {place} ? {name} {verb} there with {name1} .",
        "what does {name} see ? {name} can see {thing} and {thing1} over the {place} .",
        "{name} and {name1} have many things of their own , and each item comes from the {place} .",
        "the smallest thing to come in is the {animal} , which will own and hold it .",
        "when there is {thing} , {name} {verb} , because of all the {thing} .",
    ),
    "table": (
        "{a} + {b} = {c}",
        "{c} - {b} = {a}",
        "{a} plus {b} [is|equals|makes|gives] {c} .",
        "{c} [minus|less] {b} [is|equals|makes|gives] {a} .",
        "the [sum|total] of {a} and {b} is {c} .",
        "take {b} from {c} and {a} are left .",
        "add {b} to {a} and the [result|total|outcome] is {c} .",
    ),
    "count": ("{count}", "count : {count} .", "the numbers {count} follow one another ."),
    "letters": (
        "let {unknown} = {a} . then {unknown} is {a} .",
        "{unknown} is an unknown number . here its value is {a} .",
        "in this equation the letter {unknown} stands for {a} .",
        "we know that {unknown} is {c} , so the value of {unknown} [is|equals] {c} .",
    ),
    "copy": (
        "the [list|row|series] {list} again : {list}",
        "copy {list} : {list}",
        "these [letters|items|things] are in a [list|row|series] : {list} .",
    ),
    "smaller": (
        "{low} is smaller than {high} .",
        "{high} is larger than {low} .",
        "{low} comes before {high} and {high} after {low} .",
    ),
    "compare": (
        "{name} is taller than {name1} , so {name1} is shorter than {name} .",
        "{name} is older than {name1} , so {name1} is younger than {name} .",
        "{name} is faster than {name1} , so {name1} is slower than {name} .",
        "{thing} [leads to|brings] {thing1} in the end .",
    ),
    "rules": (
        "{facts} there is {start} , so {answer} .",
        "{facts} what {start} brings : {answer} .",
    ),
    "orders": ("{facts} so of {pair} : {answer} .", "{facts} {more} of {pair} : {answer}"),
    "chains": (
        "{facts} there is {start} , so in the end {answer} .",
        "{facts} what {start} leads to in the end : {answer} .",
    ),
    "glossary": (),
    "echo": (),
}

WORDINGS = {
    "gain": {
        "pretrain": (
            "{name} has {a} {item} and [gets|finds] {b} more . how many {item} does {name} have "
            "now ?",
            "there are {a} {item} in the {place} . {name} brings {b} more . how many are there "
            "now ?",
        ),
        "train": (
            "{name} [owns|holds|keeps|has] {a} {item} . then {name} [gets|finds|buys|wins|receives|"
            "collects] {b} {item} . what does {name} have ?",
            "{name} [had|owned|held|kept] {a} {item} . [later|today|afterwards] {name} [got|found|"
            "bought|won|received|collected] {b} more . how many {item} are there ?",
            "with {a} {item} at the start , {name} [gets|finds|buys|collects] {b} more in the "
            "{place} . what is the total ?",
            "{name1} gives {b} {item} to {name} , who has {a} . how many {item} does {name} hold ?",
            "in the {place} {name} [found|bought|won] {b} {item} and already had {a} . tell the "
            "[total|sum|amount] .",
            "add up the {item} of {name} : first {a} , then {b} more [from|in] the {place} .",
        ),
        "validation": (
            "{name1} [gets|buys] {b} {item} for {name} , who [kept|owned] {a} [before|already] . "
            "tell the total now .",
            "what is the amount of {item} when {name} has {a} and then [finds|wins] {b} more ?",
        ),
        "heldout": (
            "at first {name} [had|owned|kept] {a} {item} and [yesterday|later] {name1} brings {b} "
            "more . what amount is there now ?",
            "{name} [receives|wins|buys] {b} {item} from the {place} . before , there were {a} . "
            "how many does {name} own in the end ?",
            "name the sum : {a} {item} in the {place} and {b} more that {name} [collected|found] .",
        ),
    },
    "loss": {
        "pretrain": (
            "{name} has {c} {item} and [loses|sells] {b} . how many {item} does {name} have now ?",
            "there are {c} {item} in the {place} . {name} takes {b} . how many are left ?",
        ),
        "train": (
            "{name} [owns|holds|keeps|has] {c} {item} . then {name} [loses|sells|eats|breaks|drops|"
            "spends] {b} {item} . what does {name} have ?",
            "{name} [had|owned|held|kept] {c} {item} . [later|today|afterwards] {name} [lost|sold|"
            "ate|broke|dropped|spent] {b} of them . how many {item} are there ?",
            "with {c} {item} at the start , {name} [loses|sells|drops|breaks] {b} in the {place} . "
            "what is left ?",
            "{name} gives {b} {item} to {name1} and had {c} . how many {item} does {name} hold ?",
            "in the {place} {name} [lost|sold|dropped] {b} {item} of {c} . tell the remaining "
            "amount .",
            "take away the {item} that {name} [sold|ate] : first {c} , then {b} fewer [from|in] "
            "the {place} .",
        ),
        "validation": (
            "{name1} [takes|breaks] {b} {item} of {name} , who [kept|owned] {c} before . tell what "
            "is left now .",
            "what is the amount of {item} when {name} has {c} and then [loses|sells] {b} of them ?",
        ),
        "heldout": (
            "at first {name} [had|owned|kept] {c} {item} and [yesterday|later] {name1} takes {b} "
            "of them . what amount is there now ?",
            "{name} [spends|eats|breaks] {b} {item} in the {place} . before , there were {c} . how "
            "many does {name} own in the end ?",
            "name what is left over : {c} {item} in the {place} less {b} that {name} [dropped|"
            "lost] .",
        ),
    },
    "plus_unknown": {
        "pretrain": ("solve {unknown} + {b} = {c} .", "{unknown} + {b} = {c} . find {unknown} ."),
        "train": (
            "if {unknown} + {b} = {c} , what is {unknown} ?",
            "give {unknown} such that {unknown} plus {b} [is|equals|makes] {c} .",
            "{b} + {unknown} = {c} . tell {unknown} .",
            "which number {unknown} gives {c} when {b} is added to it ?",
            "the equation says {unknown} + {b} = {c} . what does {unknown} stand for ?",
            "{c} is the sum of {unknown} and {b} . name {unknown} .",
        ),
        "validation": (
            "tell the value of {unknown} , where {unknown} + {b} [makes|equals] {c} .",
            "{c} [is|equals] {unknown} plus {b} . what is {unknown} then ?",
        ),
        "heldout": (
            "let {unknown} plus {b} = {c} . then the value of {unknown} is what ?",
            "what number stands for {unknown} , so that {unknown} + {b} [gives|equals] {c} ?",
            "we know that {b} + {unknown} equals {c} . name the unknown number .",
        ),
    },
    "minus_unknown": {
        "pretrain": ("solve {unknown} - {b} = {a} .", "{unknown} - {b} = {a} . find {unknown} ."),
        "train": (
            "if {unknown} - {b} = {a} , what is {unknown} ?",
            "give {unknown} such that {unknown} minus {b} [is|equals|makes] {a} .",
            "{a} = {unknown} - {b} . tell {unknown} .",
            "which number {unknown} gives {a} when {b} is taken from it ?",
            "the equation says {unknown} - {b} = {a} . what does {unknown} stand for ?",
            "{a} is what is left of {unknown} less {b} . name {unknown} .",
        ),
        "validation": (
            "tell the value of {unknown} , where {unknown} - {b} [makes|equals] {a} .",
            "{a} [is|equals] {unknown} minus {b} . what is {unknown} then ?",
        ),
        "heldout": (
            "let {unknown} minus {b} = {a} . then the value of {unknown} is what ?",
            "what number stands for {unknown} , so that {unknown} - {b} [gives|equals] {a} ?",
            "we know that {unknown} less {b} equals {a} . name the unknown number .",
        ),
    },
    "evaluate": {
        "pretrain": (
            "let {unknown} = {a} . what is {unknown} + {b} ?",
            "{unknown} = {a} . find {unknown} + {b} .",
        ),
        "train": (
            "if {unknown} = {a} , what is {unknown} + {b} ?",
            "give {unknown} plus {b} , where {unknown} [is|equals] {a} .",
            "{unknown} stands for {a} . tell {unknown} + {b} .",
            "which number is {unknown} + {b} when {unknown} is {a} ?",
            "the value of {unknown} is {a} . name {b} + {unknown} .",
            "we add {b} to {unknown} , and {unknown} = {a} . what is the [result|outcome] ?",
        ),
        "validation": (
            "tell the value of {unknown} plus {b} , if {unknown} [is|equals] {a} .",
            "{a} [is|equals] {unknown} . what does {unknown} + {b} give then ?",
        ),
        "heldout": (
            "we know that {unknown} equals {a} . then the value of {unknown} + {b} is what ?",
            "what number is {unknown} plus {b} , so that {unknown} stands for {a} ?",
            "here {unknown} is {a} . name the sum of {unknown} and {b} .",
        ),
    },
    "order": {
        "pretrain": ("{facts} who is {more} , {pair} ?", "{facts} which one of {pair} is {more} ?"),
        "train": (
            "{facts} tell who is {more} : {pair} .",
            "is {pair} {more} ? {facts}",
            "we know this : {facts} name the {more} one of {pair} .",
            "{facts} the {more} of {pair} is who ?",
            "give the {more} one , {pair} . {facts}",
            "{facts} of {pair} , find the {more} .",
        ),
        "validation": (
            "who is the {more} one here , {pair} ? {facts}",
            "{facts} give the name of the {more} of {pair} .",
        ),
        "heldout": (
            "find the name of the {more} one of {pair} . {facts}",
            "here is what we know . {facts} so who of {pair} is {more} ?",
            "{facts} now name who is {more} , {pair} .",
        ),
    },
    "rule": {
        "pretrain": (
            "{facts} there is {start} . what follows ?",
            "{facts} what does {start} give ?",
        ),
        "train": (
            "{facts} now there is {start} . tell the [result|outcome] .",
            "there is {start} . {facts} what [comes|results] ?",
            "{facts} name the thing that {start} brings .",
            "{facts} from {start} , what [follows|results|comes] ?",
            "what does {start} lead to ? {facts}",
            "we know this : {facts} and we have {start} . what is there now ?",
        ),
        "validation": (
            "give what follows when there is {start} . {facts}",
            "{facts} what is the outcome of {start} ?",
        ),
        "heldout": (
            "we have {start} here . {facts} what is the thing to come ?",
            "{facts} now {start} comes , so find what follows .",
            "here is what we know . {facts} tell what {start} brings .",
        ),
    },
    "chain": {
        "pretrain": (
            "{facts} there is {start} . what follows last ?",
            "{facts} we have {start} . what comes in the end ?",
        ),
        "train": (
            "{facts} now there is {start} . tell the [last|final] outcome .",
            "start with {start} . {facts} what [comes|results] in the end ?",
            "there is {start} . {facts} name the [last|final] thing that follows .",
            "{facts} from {start} , what [follows|results|comes] [finally|at last] ?",
            "what does {start} lead to in the end ? {facts}",
            "we know this : {facts} and we have {start} . give the ending .",
        ),
        "validation": (
            "give what follows in the end when there is {start} . {facts}",
            "{facts} what is the [last|final] outcome of {start} ?",
        ),
        "heldout": (
            "we have {start} here . {facts} what is the [final|last] thing to come ?",
            "{facts} beginning with {start} , find what follows in the end .",
            "here is what we know . {facts} tell what {start} finally brings .",
        ),
    },
    "reverse": {
        "pretrain": ("reverse the list {list} .", "{list} in reverse ?"),
        "train": (
            "[reverse|flip|invert] {list} .",
            "[give|tell|name] the [list|row|series] {list} from the last to the first .",
            "[reverse|flip|invert] these [letters|items|things] : {list} .",
            "here is a [list|row|series] : {list} . write it from the end to the start .",
            "what is {list} when we [reverse|flip|invert] it ?",
            "read {list} from right to left .",
        ),
        "validation": (
            "start from the last of {list} and write it to the first .",
            "what is the reverse of the [list|row] {list} ?",
        ),
        "heldout": (
            "we [flip|invert|reverse] the [row|series] {list} . what is the outcome ?",
            "write the items {list} from the end to the first .",
            "tell these things in reverse order : {list} .",
        ),
    },
    "sort": {
        "pretrain": ("sort the list {list} .", "{list} in order ?"),
        "train": (
            "[sort|arrange|order] {list} .",
            "[give|tell|name] the [list|row|series] {list} from the smallest to the largest .",
            "[sort|arrange|order] these [numbers|items|things] : {list} .",
            "here is a [list|row|series] : {list} . write it with the smaller ones before the "
            "larger .",
            "what is {list} when we [sort|arrange|order] it ?",
            "put {list} in a [row|series] , smallest first .",
        ),
        "validation": (
            "start from the smallest of {list} and write it to the largest .",
            "what is the order of the [list|row] {list} , smaller first ?",
        ),
        "heldout": (
            "we [sort|arrange|order] the [row|series] {list} . what is the outcome ?",
            "write the items {list} from the smaller to the larger .",
            "tell these things smallest first : {list} .",
        ),
    },
    "last": {
        "pretrain": ("what is last in the list {list} ?", "the last of {list} ?"),
        "train": (
            "[give|tell|name|find] the [last|final] of {list} .",
            "which one stands at the end of {list} ?",
            "here is a [list|row|series] : {list} . what comes last in it ?",
            "what is the [last|final] item of {list} ?",
            "the [list|row|series] {list} ends with which one ?",
            "read {list} and [give|tell|name] its ending .",
        ),
        "validation": (
            "find what is at the end of the [list|row] {list} .",
            "{list} : name its last item .",
        ),
        "heldout": (
            "in the [row|series] {list} , find the one at the end .",
            "what is the ending of these things : {list} ?",
            "name the final one of the items {list} .",
        ),
    },
    "occurrences": {
        "pretrain": (
            "how many {item} are in the list {list} ?",
            "count {item} in {list} .",
        ),
        "train": (
            "how [often|many times] is {item} in {list} ?",
            "[give|tell|find] how many {item} the [list|row|series] {list} has .",
            "here is a [list|row|series] : {list} . how often does {item} come ?",
            "what is the count of {item} in {list} ?",
            "count the letter {item} : {list} .",
            "the [list|row|series] {list} holds {item} how many times ?",
        ),
        "validation": (
            "how many of the letters {list} are {item} ?",
            "find the number of times that {item} comes in {list} .",
        ),
        "heldout": (
            "in the [row|series] {list} , how many occurrences of {item} are there ?",
            "count how often the items {list} have {item} .",
            "tell the amount of {item} in these letters : {list} .",
        ),
    },
}
